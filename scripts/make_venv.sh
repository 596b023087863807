#!/usr/bin/env bash
# Creates a virtual environment with the pinned dependencies and this project: scripts/make_venv.sh [DIR].
# Looks for Python >= 3.12 in $PYTHON, on the PATH and among pyenv's versions.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }

python=
for candidate in ${PYTHON:-} python3.12 python3.13 python3 python \
  "$HOME"/.pyenv/versions/3.12*/bin/python3.12 "$HOME"/.pyenv/versions/3.13*/bin/python3.13; do
  if usable "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "error: found no Python 3.12 or 3.13 with venv; install one (Debian: python3.12-venv; pyenv install 3.12), or set PYTHON=/path/to/python" >&2
  exit 2
fi

echo "creating $venv with $("$python" --version) ($python) and installing the pinned packages, which takes about a minute"
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
touch "$venv/installed"
