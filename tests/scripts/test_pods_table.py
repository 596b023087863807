"""The page of compiled pods is the one that its command writes from the records beside it."""

import json

from mesanet_jax.aot.topology import parse
from scripts.results import pods_table


def test_the_page_is_what_the_command_writes():
    hint = "python -m scripts.results.pods_table --page"
    assert pods_table.page().splitlines() == pods_table.PAGE.read_text().splitlines(), hint


def test_every_record_belongs_to_a_row():
    wanted = {pods_table.record_of(*task).name: task for task in pods_table.tasks()}
    for path in pods_table.RECORDS.iterdir():
        spec, pod = wanted[path.name]
        facts = json.loads(path.read_text())
        assert (facts["config"].replace("_", "-"), facts["topology"]) == (spec.replace(":", "-").replace("_", "-"), pod)
        assert parse(pod)
