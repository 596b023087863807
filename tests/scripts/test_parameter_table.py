"""Tests that every shipped config has as many parameters as MesaNet, and that the page is what its command prints."""

import pytest

from mesanet_jax.recipes.backbone import PAPER
from scripts.results import parameter_table
from tests.helpers.smoke import ROOT


@pytest.fixture(scope="module")
def rows():
    return [
        parameter_table.measure(spec, size) for spec, size in parameter_table.shipped(parameter_table.BASELINES).items()
    ]


@pytest.mark.parametrize("size", PAPER)
def test_as_many_parameters_as_mesanet(rows, size):
    counts = {row.spec: row.parameters for row in rows if row.size == size}
    mesanet = counts[f"mesanet:{size}"]
    assert len(counts) >= 13
    assert {spec: count for spec, count in counts.items() if abs(count / mesanet - 1) > 0.02} == {}


def test_the_document_is_what_the_command_prints(rows):
    hint = "if the change is intended: python -m scripts.results.parameter_table > docs/results/parameters.md"
    written = (ROOT / "docs" / "results" / "parameters.md").read_text()
    assert parameter_table.document(rows).splitlines() == written.splitlines(), hint
