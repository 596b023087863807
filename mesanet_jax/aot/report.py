"""Reports what compiling a training step shows about a run, as a record for JSON and as text for the console."""

import datetime
from collections.abc import Callable, Iterable
from typing import Any

import jax

from mesanet_jax.aot import collectives, executable, hlo, matmuls, memory
from mesanet_jax.aot.build import Build
from mesanet_jax.aot.estimate import estimate, utilisation
from mesanet_jax.aot.memory import GIBIBYTE
from mesanet_jax.aot.price import Price
from mesanet_jax.formatting import duration, short_number

_ACROSS_SLICES = "transfers between slices are counted at the speed of the chips' links, but the network is slower"
Facts = dict[str, Any]  # what `record` returns


def record(build: Build, price: Price | None) -> Facts:
    """Returns everything that is known about a build, as JSON can hold it; bytes and FLOPs are per chip and step."""
    config, devices = build.config, build.topology.devices
    result = {
        "config": config.name,
        "topology": build.topology.name,
        "slices": build.topology.slices,
        "chips": len(devices),
        "mesh": dict(build.program.mesh.shape),
        "batch_size": config.data.batch_size,
        "seq_len": config.data.seq_len,
        "rows_per_device": config.train.rows_per_device,
        "accumulation": build.program.accumulation,
        "remat": config.model.remat,
        "compile_seconds": build.seconds,
        "date": datetime.date.today().isoformat(),
        "versions": executable.versions(build.topology.platform == "tpu"),
        "memory": memory.measure(build),
        "memory_limit": memory.limit(build),
        "fits": memory.fits(build),
        "model_flops": build.flops / len(devices),
    }
    return result if build.executable is None else result | _compiled(build, build.executable, price)


def _compiled(build: Build, compiled: jax.stages.Compiled, price: Price | None) -> Facts:
    module, costs = hlo.parse(compiled.as_text() or ""), compiled.cost_analysis()
    assert costs is not None
    return {
        "matmul_flops": matmuls.flops(module),
        "xla_flops_loops_once": costs["flops"],
        "unknown_loops": hlo.unknown_loops(module),
        "collectives": {each.kind: {"count": each.count, "bytes": each.bytes} for each in collectives.measure(module)},
        "estimate": _estimated(build, module, price),
    }


def _estimated(build: Build, module: hlo.Module, price: Price | None) -> Facts | None:
    """Returns the estimate and what follows from it, each as [transfers all hidden, none hidden]."""
    guess = estimate(build, module)
    if guess is None:
        return None
    chips, tokens = len(build.topology.devices), build.config.data.batch_size * build.config.data.seq_len
    result = {
        "computing_seconds": guess.computing,
        "transfer_seconds": guess.transfers,
        "kernels_without": guess.kernels,
        "others_without": guess.others,
        "step_seconds": list(guess.seconds),
        "tokens_per_second": [tokens / seconds for seconds in guess.seconds],
        "mfu": [utilisation(build, seconds) for seconds in guess.seconds],
    }
    if price is not None:
        costs = [price.per_billion_tokens(speed, chips=chips) for speed in result["tokens_per_second"]]
        result |= {"dollars_per_billion_tokens": costs, "price": vars(price)}
    return result


def page(facts: Facts) -> str:
    """Returns the record as text."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in facts["mesh"].items())
    lines = [
        f"{facts['config']} on {facts['chips']} chips of {facts['topology']}"
        + (f", {facts['slices']} slices" if facts["slices"] > 1 else "")
        + f" ({mesh}), compiled in {duration(facts['compile_seconds'])}",
        f"{facts['batch_size']} x {facts['seq_len']} tokens per step, accumulation {facts['accumulation']},"
        f" remat {facts['remat']}",
        "",
        *_memory_lines(facts),
        *(_program_lines(facts) if "estimate" in facts else []),
        *([_ACROSS_SLICES] if facts["slices"] > 1 and facts.get("estimate") else []),
    ]
    return "\n".join(lines)


def slowest(facts: Facts) -> float | None:
    """Returns the estimated seconds per step with no transfer hidden, if there is an estimate."""
    return max(facts["estimate"]["step_seconds"]) if facts.get("estimate") else None


def line(facts: Facts) -> str:
    """Returns one line about a candidate of --suggest."""
    total, seconds = sum(facts["memory"].values()) / GIBIBYTE, slowest(facts)
    fits = "fits" if facts["fits"] else "does not fit"
    guess = "" if seconds is None else f"  {seconds:#.3g} s per step (estimate)"
    return f"remat {facts['remat']:<8} rows {facts['rows_per_device']:>3}  {total:#8.3g} GiB  {fits}{guess}"


def _memory_lines(facts: Facts) -> list[str]:
    total, bound = sum(facts["memory"].values()), facts["memory_limit"]
    rows = [("memory per chip", "GiB")] + [(kind, f"{size / GIBIBYTE:#.3g}") for kind, size in facts["memory"].items()]
    if bound is None:
        verdict = ""
    elif facts["fits"]:
        verdict = f"fits: {100 * total / bound:.0f} % of {bound / GIBIBYTE:.2f} GiB"
    else:
        verdict = f"DOES NOT FIT in {bound / GIBIBYTE:.2f} GiB; --suggest looks for rows and a remat policy that fit"
    return [*_columns(rows), f"{'total':<24}{total / GIBIBYTE:>#10.3g}  {verdict}".rstrip()]


def _program_lines(facts: Facts) -> list[str]:
    lines = ["", *_columns([("per chip and step", "TFLOP")] + [
        ("model", f"{facts['model_flops'] / 1e12:#.3g}"),
        ("compiled products", f"{facts['matmul_flops'] / 1e12:#.3g}"),
    ])]  # fmt: skip
    if facts["unknown_loops"]:
        lines.append(
            f"{facts['unknown_loops']} loops have a length that depends on the data; they count as one iteration"
        )
    traffic = [(kind, f"{each['count']}", f"{each['bytes'] / 1e9:#.3g}") for kind, each in facts["collectives"].items()]
    lines += ["", *_columns([("collectives per chip", "count", "GB"), *(traffic or [("none", "0", "0")])])]
    return lines + (_estimate_lines(facts["estimate"]) if facts["estimate"] else [])


def _estimate_lines(guess: Facts) -> list[str]:
    rows = [
        ("seconds per step", _range(guess["step_seconds"], "{:#.3g}".format)),
        ("tokens/s", _range(guess["tokens_per_second"], short_number)),
        ("MFU", _range(guess["mfu"], lambda value: f"{100 * value:.1f} %")),
    ]
    if "price" in guess:
        rows.append(("$ per billion tokens", _range(guess["dollars_per_billion_tokens"], "{:.2f}".format)))
    lines = [
        "",
        "ESTIMATE, not a measurement: the cycles that the compiler expects. The range is from all transfers between",
        f"chips hidden ({guess['transfer_seconds']:#.3g} s at full link speed) to none hidden. Other delays are not",
        "included.",
        *(f"{name:<24}{value:>22}" for name, value in rows),
    ]
    if guess["kernels_without"]:
        lines.append(
            f"The seconds are a LOWER bound: {guess['kernels_without']} calls of Pallas kernels per step have no"
            " estimate and count as nothing, and the compiled products do not include theirs."
        )
    if guess["others_without"]:
        lines.append(
            f"{guess['others_without']} gathers, scatters or sorts per step have no estimate and count as nothing."
        )
    if "price" in guess:
        price = guess["price"]
        lines.append(f"at ${price['dollars']:.2f} per chip and hour ({price['source']}, {price['date']})")
    return lines


def _range(values: Iterable[float], form: Callable[[float], str]) -> str:
    return " .. ".join(form(value) for value in sorted(values))


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    return [f"{name:<24}" + "".join(f"{value:>10}" for value in values) for name, *values in rows]
