"""Shows which kernels take the time of a profiled run: `python -m scripts.results.kernel_times RUN/profile [--top=40]`

Reads the newest trace in RUN/profile, which training writes with --config.profile.start=STEP (and
--config.profile.steps). For each device it prints a table of the kernels, ordered by the time of all their calls; for
the first device it also draws RUN/profile/kernels.png.
"""

import collections
import pathlib
from typing import Any, NamedTuple

import jax

from mesanet_jax import cli
from mesanet_jax.errors import UserError
from mesanet_jax.reporting import plots
from mesanet_jax.reporting.tables import markdown_table

# The lines of a device's plane that hold what it executed: one line per stream of a GPU, one line for a TPU. The other
# lines repeat the same events.
EXECUTED = ("Stream", "XLA Ops")
DRAWN = 15  # kernels in the plot
NANOSECONDS_OF_MILLISECOND = 1e6


class Kernel(NamedTuple):
    """All calls of one kernel."""

    name: str
    calls: int
    milliseconds: float


def main(argv: list[str]) -> None:
    flags = cli.parser(__doc__)
    flags.add_argument("profile", type=pathlib.Path, help="the `profile` directory of a run")
    flags.add_argument("--top", type=int, default=40, help="the number of kernels to print")
    args = flags.parse_args(argv)
    traces = sorted(args.profile.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise UserError(f"{args.profile}: no trace (*.xplane.pb) here; train with --config.profile.start=STEP")
    devices = by_device(jax.profiler.ProfileData.from_file(str(traces[-1])))
    if not devices:
        raise UserError(f"{traces[-1]}: nothing that a GPU or a TPU executed; the trace of a CPU has no kernels")
    for device, kernels in devices.items():
        print(f"{device}: {sum(kernel.milliseconds for kernel in kernels):,.1f} ms in {len(kernels)} kernels\n")
        print(table(kernels, args.top), end="\n\n")
    draw(args.profile / "kernels.png", *next(iter(devices.items())))


def by_device(trace: Any) -> dict[str, list[Kernel]]:
    """Returns the kernels that each device of a `jax.profiler.ProfileData` executed, the longest total time first."""
    found = {}
    for plane in trace.planes:
        events = [event for line in plane.lines if line.name.startswith(EXECUTED) for event in line.events]
        if plane.name.startswith("/device:") and events:
            times = collections.defaultdict(list)
            for event in events:
                times[event.name].append(event.duration_ns / NANOSECONDS_OF_MILLISECOND)
            kernels = [Kernel(name, len(calls), sum(calls)) for name, calls in times.items()]
            found[plane.name] = sorted(kernels, key=lambda kernel: -kernel.milliseconds)
    return found


def table(kernels: list[Kernel], top: int) -> str:
    """Returns the first `top` kernels as a Markdown table."""
    total = sum(kernel.milliseconds for kernel in kernels)
    rows = [
        (name[:80], f"{calls:,}", f"{milliseconds:,.3f}", f"{100 * milliseconds / total:.1f}")
        for name, calls, milliseconds in kernels[:top]
    ]
    return markdown_table(("kernel", "calls", "ms", "%"), rows)


def draw(png: pathlib.Path, device: str, kernels: list[Kernel]) -> None:
    """Draws the times of the longest kernels."""
    plt = plots.pyplot()
    shown = kernels[:DRAWN][::-1]
    with plt.rc_context(plots.STYLE):
        figure, axis = plt.subplots(figsize=(8, 0.8 + 0.3 * len(shown)), layout="constrained")
        axis.barh([kernel.name[:48] for kernel in shown], [kernel.milliseconds for kernel in shown], color=plots.BLUE)
        axis.set(title=f"the longest kernels on {device}", xlabel="ms, all calls")
        axis.grid(axis="y", visible=False)
        plots.save(figure, png)


if __name__ == "__main__":
    cli.run(main)
