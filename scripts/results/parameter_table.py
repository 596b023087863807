"""Prints docs/results/parameters.md: `python -m scripts.results.parameter_table > docs/results/parameters.md`

Lists the parameters, FLOPs and decoding state of every shipped config at the papers' sizes. Nothing is trained or
allocated.
"""

import dataclasses
import pathlib
from collections.abc import Collection

import jax

from mesanet_jax import models, schema
from mesanet_jax.recipes.backbone import PAPER

ROOT = pathlib.Path(__file__).parents[2]

SHIPPED = ROOT / "tests" / "golden" / "configs"  # one text file per config, named FAMILY-VARIANT.txt
# The config that the others of a size are compared with: MesaNet, and at Maglev's largest size its Transformer.
BASELINES = {size: f"mesanet:{size}" for size in PAPER} | {"d20": "maglev:d20-interleaved"}
LENGTH = 2048  # tokens per row


@dataclasses.dataclass(frozen=True)
class Row:
    """The measures of one config.

    Attributes:
      forward, training: FLOPs per token in a row of `LENGTH`.
      state: bytes of the decoding state of one sequence.
    """

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
        """Returns the row of the table."""
        return (
            f"| `{self.spec}` | {self.parameters:,} | {self.parameters / baseline.parameters:.4f} "
            f"| {self.forward / 1e6:,.0f} | {self.training / 1e6:,.0f} | {self.state / 2**20:.2f} |"
        )


def shipped(wanted: Collection[str] = PAPER) -> dict[str, str]:
    """Returns the shipped configs that have one of the sizes `wanted`, as {spec: size}."""
    names = [path.stem.partition("-") for path in sorted(SHIPPED.glob("*.txt"))]
    sizes = {f"{family}:{variant}": variant.partition("-")[0] for family, _, variant in names}
    return {spec: size for spec, size in sizes.items() if size in wanted}


def measure(spec: str, size: str) -> Row:
    """Measures a shipped config, given as FAMILY:VARIANT."""
    family, _, variant = spec.partition(":")
    model = models.build(schema.load_file(f"{ROOT}/configs/{family}.py:{variant}").model)
    flops = model.flops_per_token(LENGTH)
    state = jax.eval_shape(lambda params: model.init_state(params, 1, max_length=LENGTH), model.shapes)
    size_of = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return Row(spec, size, model.parameter_count(), flops.forward, flops.training, size_of)


def document(rows: list[Row]) -> str:
    """Returns the whole page."""
    lines = [
        "# Parameters, FLOPs and decoding state of every config at the papers' sizes",
        "",
        "```",
        "python -m scripts.results.parameter_table > docs/results/parameters.md",
        "```",
        "",
        "- *ratio*: the parameters relative to those of the first config of the size.",
        f"- *MFLOPs*: per token in a row of {LENGTH} tokens, as defined in `mesanet_jax/flops.py` and checked against",
        "  XLA's count in `tests/test_flops.py`. Those of Mesa include all iterations of the solver.",
        f"- *state*: the memory that decoding one sequence of {LENGTH} tokens needs. Only the state of full attention",
        "  grows with the length of the sequence.",
    ]
    for size, spec in BASELINES.items():
        (baseline,) = (row for row in rows if row.spec == spec)
        of_size = [row for row in rows if row.size == size and row is not baseline]
        of_size = [baseline, *sorted(of_size, key=lambda row: (row.family, row.state, row.spec))]
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
