"""Every shipped config as text, so that a changed default shows in review.

`python -m tests.test_golden_configs`, run in the repository's root, writes the texts again.
"""

import pathlib

import pytest

from configs import (
    deltanet,
    gated_deltanet,
    gla,
    griffin,
    gss,
    hawk,
    hawk_mesa,
    lrt,
    maglev,
    mamba2,
    mesanet,
    nanochat,
    pha,
    prepare,
    sliding_window,
    transformer,
    xlstm,
)
from mesanet_jax import schema
from mesanet_jax.recipes import backbone

GOLDEN = pathlib.Path(__file__).parent / "golden" / "configs"
CONFIGS = {
    f"{name}-{variant}": (module, variant)
    for name, module, variants in (
        ("mesanet", mesanet, backbone.SIZES),
        ("transformer", transformer, backbone.SIZES),
        ("gla", gla, backbone.SIZES + backbone.PUBLISHED_SIZES),
        ("mamba2", mamba2, backbone.SIZES + backbone.PUBLISHED_SIZES),
        ("deltanet", deltanet, backbone.SIZES),
        ("gated_deltanet", gated_deltanet, backbone.SIZES + backbone.PUBLISHED_SIZES),
        ("griffin", griffin, backbone.SIZES),
        ("gss", gss, backbone.SIZES),
        ("hawk", hawk, backbone.SIZES),
        ("hawk_mesa", hawk_mesa, backbone.SIZES),
        ("sliding_window", sliding_window, sliding_window.SIZES),
        ("xlstm", xlstm, backbone.SIZES + backbone.PUBLISHED_SIZES),
        ("pha", pha, (*pha.SIZES, *(f"125m-{variant}" for variant in pha.VARIANTS))),
        ("nanochat", nanochat, nanochat.SIZES),
        (
            "maglev",
            maglev,
            (*maglev.SIZES, *(f"{size}-{v}" for size in ("d20", "demo") for v in maglev.VARIANTS if v)),
        ),
        ("lrt", lrt, (*lrt.SIZES, *(f"{size}-{v}" for size in ("d20", "demo") for v in lrt.VARIANTS if v))),
        ("prepare", prepare, prepare.PRESETS),
    )
    for variant in variants
}


def text_of(name: str) -> str:
    module, variant = CONFIGS[name]
    return "".join(f"{path} = {value!r}\n" for path, value in schema.flatten(module.get_config(variant)).items())


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_as_written(name):
    written = (GOLDEN / f"{name}.txt").read_text().splitlines()
    hint = "if the change is intended, run: python -m tests.test_golden_configs"
    assert text_of(name).splitlines() == written, hint


def test_every_text_has_its_config():
    assert {path.stem for path in GOLDEN.iterdir()} == set(CONFIGS)


if __name__ == "__main__":
    for stale in GOLDEN.glob("*.txt"):
        stale.unlink()
    for name in CONFIGS:
        (GOLDEN / f"{name}.txt").write_text(text_of(name))
