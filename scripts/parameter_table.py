"""Prints docs/results/parameters.md: `python scripts/parameter_table.py > docs/results/parameters.md`

Parameters, FLOPs and decoding state of every shipped config of the paper's sizes. Nothing is trained or allocated.
"""

import dataclasses
import pathlib
import sys

import jax

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for `configs`

from configs.backbone import PAPER  # noqa: E402
from mesanet_jax import models, schema  # noqa: E402

SHIPPED = ROOT / "tests" / "golden" / "configs"  # a text for every config, named FAMILY-VARIANT.txt
BASELINE = "mesanet"
LENGTH = 2048


@dataclasses.dataclass(frozen=True)
class Row:
    """One config: FLOPs are those of a token in a row of `LENGTH`, bytes those of one sequence's decoding state."""

    spec: str
    size: str
    parameters: int
    forward: float
    training: float
    state: int

    @property
    def family(self) -> str:
        return self.spec.partition(":")[0]

    def markdown(self, baseline: "Row") -> str:
        return (
            f"| `{self.spec}` | {self.parameters:,} | {self.parameters / baseline.parameters:.4f} "
            f"| {self.forward / 1e6:,.0f} | {self.training / 1e6:,.0f} | {self.state / 2**20:.2f} |"
        )


def shipped() -> dict[str, str]:
    """{spec: size} of the shipped configs that have a size of the paper."""
    names = [path.stem.partition("-") for path in sorted(SHIPPED.glob("*.txt"))]
    sizes = {f"{family}:{variant}": variant.partition("-")[0] for family, _, variant in names}
    return {spec: size for spec, size in sizes.items() if size in PAPER}


def measure(spec: str, size: str) -> Row:
    family, _, variant = spec.partition(":")
    model = models.build(schema.load_file(f"{ROOT}/configs/{family}.py:{variant}").model)
    flops = model.flops_per_token(LENGTH)
    state = jax.eval_shape(lambda params: model.init_state(params, 1, max_length=LENGTH), model.shapes)
    size_of = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return Row(spec, size, model.parameter_count(), flops.forward, flops.training, size_of)


def document(rows: list[Row]) -> str:
    """The whole page."""
    lines = [
        "# Every config at the paper's sizes: parameters, FLOPs, decoding state",
        "",
        "```",
        "python scripts/parameter_table.py > docs/results/parameters.md",
        "```",
        "",
        f"Ratio: to the parameters of `{BASELINE}` of that size. MFLOPs: of a token in a row of {LENGTH}, as",
        "`mesanet_jax/flops.py` defines them and `tests/test_flops.py` holds against XLA's count; Mesa's with all solver",
        f"iterations. State: MiB that one sequence of {LENGTH} tokens needs for decoding; only that of full attention grows",
        "with the sequence.",
    ]
    for size in PAPER:
        of_size = sorted((row for row in rows if row.size == size), key=lambda row: (row.family, row.state))
        (baseline,) = (row for row in of_size if row.spec == f"{BASELINE}:{size}")
        lines += [
            "",
            f"## {size}",
            "",
            "| config | parameters | ratio | MFLOPs forward | MFLOPs training | state MiB |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
            *(row.markdown(baseline) for row in of_size),
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document([measure(spec, size) for spec, size in shipped().items()]), end="")
