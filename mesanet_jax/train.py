"""Pretrains a model: `python -m mesanet_jax.train --config=configs/mesanet.py:140m --workdir=DIR --config.data.path=D`

Run the same command again to resume a run that was stopped; a run that is finished says so and exits with status 0.
Several processes train one model if each of them gets --coordinator (see docs/distributed.md).

Exit status (the same in every process of a run):
    0    the run is finished
    1    the run stopped because a loss was not finite, or because of an unexpected error
    2    there is a mistake in the command, the config, the data or the workdir
    75   no step finished for config.train.watchdog_minutes
    76   another process died or stopped responding (134 if jax.distributed noticed it first)
    130  the run was stopped by Ctrl-C, and its completed steps are saved
    143  the run was stopped by SIGTERM, and its completed steps are saved
"""

import contextlib
import dataclasses
import pathlib

import jax
from etils import epath

from mesanet_jax import cli, models, schema
from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax.aot import executable
from mesanet_jax.data.loader import Batches
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.formatting import short_number
from mesanet_jax.models import Model
from mesanet_jax.reporting import layer_stats
from mesanet_jax.reporting.plots import plot_terms, plot_training, terms
from mesanet_jax.reporting.progress import Progress
from mesanet_jax.reporting.trackers import Trackers, make_trackers, read_json_lines
from mesanet_jax.runtime import distributed
from mesanet_jax.runtime import workdir as workdir_lib
from mesanet_jax.runtime.bucket_sync import BucketSync
from mesanet_jax.runtime.goodput import Goodput
from mesanet_jax.runtime.preemption import Preemption
from mesanet_jax.runtime.watchdog import Watchdog
from mesanet_jax.schema import Config
from mesanet_jax.training import step as step_lib
from mesanet_jax.training.arguments import parse
from mesanet_jax.training.checkpoint import Checkpoints
from mesanet_jax.training.data import open_data, run_metadata
from mesanet_jax.training.profiler import Profiler
from mesanet_jax.training.resume import initial_state
from mesanet_jax.training.throughput import Throughput
from mesanet_jax.training.validation import Validation


def main(argv: list[str]) -> int:
    goodput = Goodput()
    args, config = parse(argv, doc=__doc__)
    if args.help_config:
        print(schema.describe(config_lib.schema(config.model.kind, config.model.pattern)))
        return 0
    with distributed.joined(args, config.processes):
        rows, validation_rows = open_data(config)  # first, so that a mistake here leaves no workdir behind
        with workdir_lib.lock(args.workdir), Preemption() as preemption:
            return train(config, args.workdir, rows, validation_rows, preemption=preemption, goodput=goodput)


def train(
    config: Config,
    workdir: epath.Path,
    rows: PackedRows,
    validation_rows: PackedRows,
    *,
    preemption: Preemption,
    goodput: Goodput,
) -> int:
    """Trains in `workdir` from its newest checkpoint, or from the start, to the last step; returns the exit status."""
    # ---- what the run is, and whether it is the one in this workdir
    checkpoints = Checkpoints(workdir, keep_last=config.checkpoint.keep_last, keep_every=config.checkpoint.keep_every)
    changed_fields = workdir_lib.check(workdir, config, begun=bool(checkpoints.steps()))
    workdir_lib.use_compile_cache(workdir, config)

    # ---- the mesh, the model and the compiled step
    mesh = mesh_lib.make_mesh(tuple(config.mesh[axis] for axis in mesh_lib.AXES))
    model = models.build(config.model)
    program = step_lib.compile_program(config, model, mesh)
    if config.train.executable is not None:
        saved_step = executable.load(pathlib.Path(config.train.executable), config, program)
        program = dataclasses.replace(program, train=saved_step)
    flops_per_token = model.flops_per_token(config.data.seq_len).training
    chief = distributed.is_chief()

    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(config.train.watchdog_minutes))
        stack.callback(checkpoints.close)  # waits for the other processes
        stack.enter_context(distributed.without_cleanup())
        stack.enter_context(mesh_lib.use_mesh(mesh))
        if chief:
            print(banner(config, model, program, rows, flops_per_token), flush=True)
            for line in changed_fields:
                print(f"changed since this run began: {line}", flush=True)

        # ---- the state: from a checkpoint, from given weights, or fresh
        metadata = run_metadata(config, rows)
        state, start = initial_state(config, program, model, checkpoints, metadata)
        if chief:
            workdir_lib.save(workdir, config)

        # ---- where the run reports, and what it reads
        files = stack.enter_context(BucketSync(workdir))
        metrics_file = files.local / "metrics.jsonl"
        if chief:
            goodput.resume(files.local, start)
        progress = Progress(config.steps, start=start, enabled=chief, live=config.log.progress)
        stack.enter_context(progress)
        if start:
            progress.message(f"resuming after step {start}")
        trackers = make_trackers(config, files.local, from_step=start)
        stack.callback(trackers.close)
        profiler = stack.enter_context(Profiler(config, files.local))
        tokens_per_step = config.data.batch_size * config.data.seq_len
        throughput = Throughput(tokens_per_step, flops_per_token=flops_per_token, devices=list(mesh.devices.flat))
        local_rows = mesh_lib.local_rows(mesh, config.data.batch_size)
        batches = Batches(rows, config.data.batch_size, seed=config.data.seed, steps=config.steps, positions=local_rows)
        validation = Validation(config, program, validation_rows, preemption=preemption, watchdog=watchdog)

        def validate(step: int) -> None:
            with goodput.spending("evaluation"):
                scalars = validation.scalars(state["params"])
                if scalars is not None:
                    trackers.log(step, scalars)
                    progress.update(step, scalars)

        # ---- the loop: update s reads batch s - 1. Its metrics are fetched one step later, so that the devices never
        # wait for the host.
        pending, step, stop = None, start, False
        goodput.enter("compile")
        for step, batch in enumerate(mesh_lib.placed(batches.iterate(start), mesh), start=start + 1):
            profiler.before(step)
            state, metrics = program.train(state, batch)
            preemption.unsaved = True  # not before the first step: while it compiles, a signal may end the run at once
            goodput.enter("training")
            if pending is not None:
                report(*pending, config, trackers, progress, throughput)
                watchdog.beat()
            pending = step, metrics
            last, stop = step == config.steps, preemption.requested()
            due_eval = last or (config.train.eval_every and step % config.train.eval_every == 0)
            due_save = last or stop or step % config.checkpoint.every == 0
            if due_eval or due_save:
                # Metrics first, so that a loss that is not finite stops the run before anything is written. This waits
                # for the step, which would distort the measured speed, so the open window is dropped.
                report(*pending, config, trackers, progress, None)
                pending = None
                throughput.restart()
            if due_save:
                with goodput.spending("checkpoint"):
                    checkpoints.save(step, state, metadata)
                goodput.saved(step)
                files.flush()
            if chief and (due_save or step % config.train.log_every == 0):
                goodput.write(files.local)
            if stop:
                break
            if due_eval:
                validate(step)
        with goodput.spending("checkpoint"):
            checkpoints.wait()
        if chief:
            goodput.write(files.local)
        progress.message(goodput.summary())
        if preemption.interrupted():
            progress.message(f"stopped by a signal, step {step} is saved; run the same command to resume")
            return preemption.exit_status

        # ---- the end
        if start == config.steps and not is_validated(metrics_file, start):  # stopped after its last save
            validate(start)
        trackers.close()
        if chief:
            plot(metrics_file, workdir, title=config.name)
        progress.message(f"finished: {workdir} holds all {config.steps} steps; curves in {workdir / 'loss.png'}")
    return 0


def banner(config: Config, model: Model, program: step_lib.Program, rows: PackedRows, flops_per_token: float) -> str:
    """Describes in three lines what is trained, on which devices, on how many tokens."""
    devices = program.mesh.devices
    layout = " x ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items())
    tokens = config.steps * config.data.batch_size * config.data.seq_len
    epochs = config.steps * config.data.batch_size / len(rows)
    return (
        f"{config.name}: {model.parameter_count() / 1e6:.1f}M parameters on"
        f" {devices.size} {devices.flat[0].device_kind} ({layout})\n"
        f"{config.steps} steps of {config.data.batch_size} x {config.data.seq_len} tokens"
        f" ({short_number(tokens)} tokens, {epochs:.2g} epochs of {len(rows)} rows)\n"
        f"gradients accumulated over {program.accumulation} part(s), {flops_per_token / 1e9:.3g} GFLOPs per token"
    )


def report(
    step: int,
    metrics: step_lib.Metrics,
    config: Config,
    trackers: Trackers,
    progress: Progress,
    throughput: Throughput | None,
) -> None:
    """Fetches the metrics of a step, logs them if they are due, and stops the run if the step was not finite.

    Raises:
      SystemExit: with status 1, on a step that is not finite and that the config does not allow to be skipped.
    """
    scalars = {name: float(value) for name, value in jax.device_get(metrics).items()}
    skipped = int(scalars["skipped"])
    if skipped or step % config.train.log_every == 0 or step in (1, config.steps):
        if throughput is not None:
            scalars |= throughput.measure(step)
        trackers.log(step, scalars)
        progress.update(step, scalars)
    allowed = config.train.max_skips if config.train.nonfinite == "skip" else 0
    if skipped > allowed:
        raise SystemExit(
            f"step {step}: the loss ({scalars['loss']}), the gradient norm ({scalars['grad_norm']}) or the updated"
            f" parameters are not finite, for {skipped} step(s) in a row; the update was not applied, and the last"
            " checkpoint is good. Lower config.optimizer.learning_rate, or set config.train.nonfinite=skip"
        )
    if skipped:
        progress.message(f"step {step}: not finite, update skipped")


def is_validated(metrics_file: pathlib.Path, step: int) -> bool:
    """Whether the metrics contain a validation after `step`."""
    return any(record["step"] == step and "validation_loss" in record for record in read_json_lines(metrics_file))


def plot(metrics_file: pathlib.Path, workdir: epath.Path, *, title: str) -> None:
    """Draws the curves of a finished run: loss.png and, for models that have them, terms.png and last-*.png."""
    plot_training(metrics_file, workdir / "loss.png", title=title)
    plot_terms({title: terms(read_json_lines(metrics_file))}, workdir / "terms.png", title=title)
    layer_stats.plot(layer_stats.newest(metrics_file), workdir / "last", title=title)


if __name__ == "__main__":
    cli.run(main)
