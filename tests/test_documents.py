"""Prose: whatever it cites exists, and it is written in the words of the field.

A failure lists every place as FILE:LINE. Fix the text there, or the name that it cites; the rules are those of
CONTRIBUTING.md, "Style".
"""

import pathlib
import re
from collections.abc import Callable, Iterable, Iterator

from mesanet_jax import config as config_lib
from mesanet_jax import schema
from mesanet_jax.data import recall
from mesanet_jax.data.schema import SCHEMA
from mesanet_jax.models import MODELS
from tests.helpers.documents import (
    CODE,
    RESULTS,
    Passage,
    anchors,
    code_files,
    headings,
    markdown_files,
    module_problem,
    passages,
)
from tests.helpers.smoke import ROOT

# What docs/adding-a-family.md has its reader write.
WRITTEN_BY_READERS = {"mesanet_jax/mixers/average.py", "configs/average.py"}
WRITTEN_BY_COMMANDS = {"comparison.md"}
CHANGELOG = ROOT / "CHANGELOG.md"  # names what no longer exists
RULES = pathlib.Path(__file__).resolve()  # contains the words that it forbids
FOLDERS = "|".join((*CODE, "docs", "mesanet_kernels", r"\.ci", r"\.github"))
MODULES = r"(?:mesanet_jax|mesanet_kernels|scripts|examples|tests)"

FILE = r"(?:py|toml|sh|txt|json|jsonl|png|zst|npz)"
PATH = re.compile(rf"(?<![\w./{{}}*<-])(?:{FOLDERS})/[\w./-]*\w\.{FILE}\b(?![\w*{{])")
QUOTED_PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")
DOCUMENT = re.compile(r"(?<![\w./{}*<$-])[\w.][\w./-]*\.md\b(?!`?\]\()")  # a link's text may be short
HEADING = re.compile(r"(?<![\w./{}*-])([\w./-]+\.md)[`)]*,? [\"“]([^\"”]+)[\"”]")
NUMBERED = re.compile(r"(?<![\w./{}*-])([\w./-]+\.md)[`)]* (\d+(?:\.\d+)*)\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"python (?:-m )?([\w./]+)")
MODULE = re.compile(rf"(?<![\w./-]){MODULES}(?:\.\w+)+(?![\w/])")
MAKE = re.compile(r"(?:`|^|\s)make ((?:\w|-)+)`")
FIELD = re.compile(r"(?<![\w-])--config\.([a-z][\w.]*\w)")


def report(problems: Iterable[str]) -> None:
    problems = sorted(set(problems))
    assert not problems, f"{len(problems)} places:\n" + "\n".join(problems)


def cited(pattern: re.Pattern, *, kinds: tuple[str, ...] = ("markdown", "docstring", "comment", "string")):
    """(passage, match) wherever the pattern occurs, the changelog left out."""
    for passage in passages():
        if passage.kind in kinds and passage.path != CHANGELOG and passage.path != RULES:
            for match in pattern.finditer(passage.text):
                yield passage, match


def exists(name: str) -> bool:
    """Whether a path from the root, or from the kernel library's, is there."""
    name = name.rstrip("/.")
    return (ROOT / name).exists() or (ROOT / "kernels" / name).exists() or name in WRITTEN_BY_READERS


def find_document(name: str, passage: Passage) -> pathlib.Path | None:
    """The Markdown file that a passage cites: by its path from the root, or from the file that it is in."""
    places = [ROOT / name, *([passage.path.parent / name] if passage.kind == "markdown" else [])]
    return next((place.resolve() for place in places if place.is_file()), None)


def test_cited_files_exist():
    def problems() -> Iterator[str]:
        for passage, match in cited(PATH):
            if not exists(match[0]):
                yield f"{passage.place}: no file {match[0]}"
        for passage, match in cited(QUOTED_PATH, kinds=("markdown", "docstring", "comment")):
            if not exists(match[1]):
                yield f"{passage.place}: no file or folder {match[1]}"
        for passage, match in cited(DOCUMENT):
            name = match[0]
            output = name in WRITTEN_BY_COMMANDS or re.match(r"runs/|[A-Z]+/", name)
            output = output or (passage.kind == "string" and "/" not in name)  # as in `folder / "report.md"`
            if not output and find_document(name, passage) is None:
                yield f"{passage.place}: no document {name}; cite it by its path, as in docs/mesa.md, or cite a paper"

    report(problems())


def test_cited_headings_exist():
    def problems() -> Iterator[str]:
        for passage, match in cited(HEADING):
            document = find_document(match[1], passage)
            if document is not None and match[2].rstrip(".,") not in headings(document):
                known = ", ".join(f'"{heading}"' for heading in headings(document))
                yield f'{passage.place}: {match[1]} has no heading "{match[2]}"; it has {known}'
        for passage, match in cited(NUMBERED):
            yield f'{passage.place}: {match[0]}: cite a heading, as in {match[1]}, "Heading"'

    report(problems())


def test_links_lead_somewhere():
    def problems() -> Iterator[str]:
        for passage, match in cited(LINK, kinds=("markdown",)):
            target, _, anchor = match[1].partition("#")
            if "://" in target:
                continue
            path = (passage.path.parent / target).resolve() if target else passage.path
            if not path.exists():
                yield f"{passage.place}: the link {match[1]} leads nowhere"
            elif anchor and anchor not in anchors(path):
                yield f"{passage.place}: {target or passage.path.name} has no heading for the anchor #{anchor}"

    report(problems())


def test_every_page_is_in_the_table_of_contents():
    contents = (ROOT / "docs" / "README.md").read_text()
    pages = [path.relative_to(ROOT / "docs") for path in markdown_files() if ROOT / "docs" in path.parents]
    report(
        f"docs/README.md: no link to {page}"
        for page in pages
        if page.name != "README.md" and f"({page})" not in contents
    )


def test_commands_and_modules_exist():
    def problems() -> Iterator[str]:
        prose = ("markdown", "docstring", "comment")
        for passage, match in cited(COMMAND, kinds=prose):
            name = match[1].rstrip(".")
            if name.endswith(".py"):
                if "/" in name and not name.startswith("/") and not exists(name):
                    yield f"{passage.place}: no file {name}"
            elif name.split(".")[0] in (*CODE, "mesanet_kernels") and (problem := module_problem(name)):
                yield f"{passage.place}: `{match[0]}`: {problem}"
        for passage, match in cited(MODULE, kinds=prose):
            written = match[0].endswith((".py", ".md")) or match[0] == "mesanet_jax.mixers.average"
            if not written and (problem := module_problem(match[0])):
                yield f"{passage.place}: {match[0]}: {problem}"

    report(problems())


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    report(
        f"{passage.place}: the Makefile has no target {match[1]}"
        for passage, match in cited(MAKE)
        if match[1] not in targets
    )


def test_fields_in_documents_exist():
    """Every `--config.FIELD` is a field of a run of some family, of preparing a corpus or of the recall task."""
    fields = (
        set(schema.flatten(SCHEMA)) | set(schema.flatten(recall.SCHEMA)) | {"model.average.decay_init", "field", "a.b"}
    )
    for kind, model in MODELS.items():
        fields |= set(schema.flatten(config_lib.schema(kind, tuple(model.MIXERS))))
    sections = {path.rsplit(".", depth)[0] for path in fields for depth in range(1, path.count(".") + 1)}
    report(
        f"{passage.place}: no field --config.{match[1]}"
        for passage, match in cited(FIELD, kinds=("markdown", "docstring", "comment"))
        if match[1] not in fields | sections and not re.search(r"[A-Z]", match[1])
    )


# "one scalar a head", "rows a device", "tokens a second": the field writes "per head".
UNITS = (
    "batch|block|byte|call|channel|chip|chunk|device|document|family|group|head|host|iteration|key|layer|minute|op|pair"
    "|parameter|position|process|row|run|second|sequence|slice|step|sweep|token|turn|update"
)
COUNT = r"(?:an?|one|two|three|four|five|so many|some|many|few|no|\d[\d.,]*[kMG]?)"
COUNTED = (
    "FLOPs?|FLOP|GB|GiB|MB|MiB|ms|bits|bytes|channels|chunks|decays|documents|dollars|flops|gates|heads|instructions|keys"
    "|kernels|layers|lengths|losses|matrices|nats|numbers|parameters|positions|processes|queries|rows|samples|scalars"
    "|seconds|segments|states|steps|sums|sweeps|tables|taps|tokens|updates|values|vectors|weights|words"
)
NOT_NOUNS = (
    "about|above|after|against|all|alone|along|and|are|around|as|at|be|been|before|begins|behind|below|beside|between|beyond|but|by"
    "|call|called|can|contains|does|during|each|either|ends|even|every|except|fills|find|finds|for|from|gets|give|given|gives|had"
    "|has|have|holds|if|in|inside|into|is|it|its|keeps|leave|leaves|less|like|make|makes|marks|means|more|names|needs|never|not|of"
    "|off|on|once|only|or|out|outside|over|per|plus|read|reads|see|sees|since|so|starts|such|take|takes|than|that|the|then"
    "|this|through|times|to|toward|towards|under|unless|until|up|upon|use|used|uses|via|was|were|what|when|whenever|where"
    "|which|while|whole|whose|with|within|without|write|writes"
)
DISTRIBUTIVE = re.compile(
    rf"\b(?:{COUNT}\s+(?:[\w-]+\s+)?(?!(?:{NOT_NOUNS})\s)[A-Za-z][\w-]*|{COUNTED})\s+an?\s+(?:{UNITS})\b(?![-'’])"
)
WORDS = re.compile(r"\b(?:likewise|foretold|foretell)\b", re.IGNORECASE)
INTERNAL = re.compile(r"(?<![\w.])/work/|/root/|\bfield notes\b|\bfield-notes\b")


def forbidden(pattern: re.Pattern, advice: Callable[[str], str]) -> Iterator[str]:
    for passage, match in cited(pattern):
        if RESULTS not in passage.path.parents:
            yield f'{passage.place}: "{match[0]}": {advice(match[0])}'


def test_what_is_counted_is_counted_per_something():
    report(forbidden(DISTRIBUTIVE, lambda text: 'write "per", or "for each"'))


def test_words_of_the_field():
    report(forbidden(WORDS, lambda text: "say it in a plain, complete sentence"))


def test_nothing_internal_is_named():
    report(forbidden(INTERNAL, lambda text: "a reader cannot open this"))


def test_lines_of_prose_are_short():
    """At most 120 characters, but for tables and code blocks. Ruff checks the lines of code."""

    def problems() -> Iterator[str]:
        for path in markdown_files():
            if RESULTS in path.parents:
                continue
            in_code = False
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                in_code ^= line.startswith("```")
                if len(line) > 120 and not in_code and not line.startswith("|"):
                    yield f"{path.relative_to(ROOT)}:{number}: {len(line)} characters"

    report(problems())


def test_the_readme_is_a_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_there_is_something_to_check():
    assert len(passages()) > 1000 and len(code_files()) > 100 and len(markdown_files()) > 10
