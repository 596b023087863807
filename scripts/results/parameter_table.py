"""Prints docs/results/parameters.md: `python -m scripts.results.parameter_table > docs/results/parameters.md`

Parameters, FLOPs and decoding state of every shipped config of the papers' sizes. Nothing is trained or allocated.
"""

import dataclasses
import pathlib
from collections.abc import Collection

import jax

from mesanet_jax import models, schema
from mesanet_jax.recipes.backbone import PAPER

ROOT = pathlib.Path(__file__).parents[2]

SHIPPED = ROOT / "tests" / "golden" / "configs"  # a text for every config, named FAMILY-VARIANT.txt
# By size, what the others are measured against: MesaNet's sizes, and Maglev's largest.
BASELINES = {size: f"mesanet:{size}" for size in PAPER} | {"d20": "maglev:d20-interleaved"}
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


def shipped(wanted: Collection[str] = PAPER) -> dict[str, str]:
    """{spec: size} of the shipped configs that have one of these sizes."""
    names = [path.stem.partition("-") for path in sorted(SHIPPED.glob("*.txt"))]
    sizes = {f"{family}:{variant}": variant.partition("-")[0] for family, _, variant in names}
    return {spec: size for spec, size in sizes.items() if size in wanted}


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
        "# Every config at the papers' sizes: parameters, FLOPs, decoding state",
        "",
        "```",
        "python -m scripts.results.parameter_table > docs/results/parameters.md",
        "```",
        "",
        f"Ratio: to the parameters of the first of that size. MFLOPs: of a token in a row of {LENGTH}, as",
        "`mesanet_jax/flops.py` defines them and `tests/test_flops.py` holds against XLA's count; Mesa's with all solver",
        f"iterations. State: MiB that one sequence of {LENGTH} tokens needs for decoding; only that of full attention grows",
        "with the sequence.",
    ]
    for size, spec in BASELINES.items():
        (baseline,) = (row for row in rows if row.spec == spec)
        order = lambda row: (row is not baseline, row.family, row.state, row.spec)
        of_size = sorted((row for row in rows if row.size == size), key=order)
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
    print(document([measure(spec, size) for spec, size in shipped(BASELINES).items()]), end="")
