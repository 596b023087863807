"""Pretrains a model: `python -m mesanet_jax.train --config=configs/mesanet.py:140m --workdir=DIR --config.data.path=...`

Read it top to bottom: it is the run. Running the same command again resumes; a finished run says so and exits 0.
Several processes run one training where each gets `--coordinator` (`mesanet_jax.runtime.distributed`).
Exit status: 0 finished, 1 stopped by non-finite losses, 2 a mistake in the command, 128 + signal after SIGTERM or
Ctrl-C (everything saved), 75 no progress (the watchdog), 76 or 134 another process died. All processes exit with the same.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import sys

import jax
from etils import epath

from mesanet_jax import cli, models, schema
from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax.aot import executable
from mesanet_jax.data.loader import Batches, eval_batches
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.evals.batches import evaluation_rows
from mesanet_jax.evals.perplexity import evaluate_rows
from mesanet_jax.reporting import layer_stats
from mesanet_jax.reporting.plots import plot_terms, plot_training, terms
from mesanet_jax.reporting.progress import Progress
from mesanet_jax.reporting.trackers import make_trackers, read_json_lines
from mesanet_jax.runtime import distributed
from mesanet_jax.runtime import workdir as workdir_lib
from mesanet_jax.runtime.bucket_sync import Spool
from mesanet_jax.runtime.goodput import Goodput
from mesanet_jax.runtime.preemption import Preemption
from mesanet_jax.runtime.watchdog import Watchdog
from mesanet_jax.training import checkpoint as checkpoint_lib
from mesanet_jax.training import step as step_lib
from mesanet_jax.training.throughput import Throughput


def main(argv: list[str]) -> int:
    goodput = Goodput()
    args, config = parse(argv)
    if args.help_config:
        print(schema.describe(config_lib.schema(config.model.kind, config.model.pattern)))
        return 0
    with distributed.joined(args, config.processes):
        data = open_data(config)  # before the workdir is made
        with workdir_lib.lock(args.workdir), Preemption() as preemption:
            return train(config, args.workdir, *data, preemption=preemption, goodput=goodput)


def parse(argv: list[str]) -> tuple:
    """(flags, checked config) of the command; launchers use it too, before they rent anything."""
    flags = cli.parser(__doc__)
    flags.add_argument("--config", required=True, help="config file and size, as in configs/mesanet.py:140m")
    flags.add_argument("--workdir", type=workdir_lib.path, help="where the run lives, also gs://; made if missing")
    flags.add_argument("--help-config", action="store_true", help="list the fields of the config and exit")
    distributed.add_flags(flags)
    args, overrides = cli.parse(flags, argv)
    config = config_lib.load(args.config, overrides)
    if args.workdir is None and not args.help_config:
        raise UserError("--workdir: is missing; name the directory of the run, as --workdir=runs/NAME")
    return args, config


def train(
    config,
    workdir: epath.Path,
    rows: PackedRows,
    validation: PackedRows,
    *,
    preemption: Preemption,
    goodput: Goodput,
) -> int:
    """Runs `config` in `workdir` to its last step, from wherever it stands: the process's exit status."""
    # ---- what the run is, and whether it is the one that this workdir holds
    saved = checkpoint_lib.Checkpoints(
        workdir, keep_last=config.checkpoint.keep_last, keep_every=config.checkpoint.keep_every
    )
    changed = workdir_lib.check(workdir, config, begun=bool(saved.steps()))
    workdir_lib.use_compile_cache(workdir, config)

    # ---- the mesh, the model and the compiled step
    mesh = mesh_lib.make_mesh(tuple(config.mesh[axis] for axis in mesh_lib.AXES))
    model = models.build(config.model)
    program = step_lib.compile_program(config, model, mesh)
    if config.train.executable is not None:
        step_file = pathlib.Path(config.train.executable)
        program = dataclasses.replace(program, train=executable.load(step_file, config, program))
    flops_per_token = model.flops_per_token(config.data.seq_len).training
    chief = distributed.is_chief()

    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(config.train.watchdog_minutes))
        stack.callback(saved.close)  # all processes together
        stack.enter_context(distributed.without_cleanup())
        stack.enter_context(jax.set_mesh(mesh))
        if chief:
            print(banner(config, model, program, rows, flops_per_token), flush=True)
            for line in changed:
                print(f"changed since this run began: {line}", flush=True)

        # ---- the state: resumed, or given weights, or fresh
        about = {"config": config.to_dict(), "data": rows.fingerprint, "tokenizer": rows.tokenizer.hash}
        state, start = initial_state(config, program, model, saved, about)
        if chief:
            workdir_lib.save(workdir, config)
        spool = stack.enter_context(Spool(workdir))
        if chief:
            goodput.resume(spool.local, start)
        progress = Progress(config.steps, start=start, enabled=chief, live=config.log.progress)
        stack.enter_context(progress)
        if start:
            progress.message(f"resuming after step {start}")
        trackers = make_trackers(config, spool.local, from_step=start)
        stack.callback(trackers.close)
        tokens = config.data.batch_size * config.data.seq_len
        throughput = Throughput(tokens, flops_per_token=flops_per_token, devices=mesh.devices.flat)
        profiler = stack.enter_context(Profiler(config, spool.local))
        mine = mesh_lib.local_rows(mesh, config.data.batch_size)
        batches = Batches(rows, config.data.batch_size, seed=config.data.seed, steps=config.steps, positions=mine)
        token_bytes = validation.tokenizer.token_bytes()
        observed = bool(jax.eval_shape(program.observe, program.state["params"], program.batch))
        eval_rows = evaluation_rows(config, shards=mesh_lib.batch_shards(mesh))

        def validation_batches():
            batches = eval_batches(validation, eval_rows, positions=mesh_lib.local_rows(mesh, eval_rows))
            for batch in itertools.islice(batches, config.train.eval_batches):
                if preemption.interrupted():
                    raise Interrupted
                watchdog.beat()
                yield batch

        def validate(step):
            with contextlib.suppress(Interrupted), goodput.spending("evaluation"):
                ahead = mesh_lib.placed(validation_batches(), mesh)
                scalars = evaluate_rows(program.scores, state["params"], ahead, token_bytes).scalars()
                if observed:
                    some = mesh_lib.placed(itertools.islice(validation_batches(), 1), mesh)
                    told = jax.device_get(program.observe(state["params"], next(some)))
                    scalars |= layer_stats.scalars(told)
                trackers.log(step, scalars)
                progress.update(step, scalars)

        # ---- the loop: update s consumes batch s - 1; its metrics are fetched one step late, so that the device
        # never waits for the host
        late, step, stop = None, start, False
        goodput.enter("compile")
        for step, batch in enumerate(mesh_lib.placed(batches.iterate(start), mesh), start=start + 1):
            profiler.at(step)
            state, metrics = program.train(state, batch)
            preemption.unsaved = True  # not earlier: the first call compiles, and a signal then may end it at once
            goodput.enter("training")
            if late is not None:
                report(*late, config, trackers, progress, throughput)
                watchdog.beat()
            late = step, metrics
            last, stop = step == config.steps, preemption.requested()
            due_eval = last or (config.train.eval_every and step % config.train.eval_every == 0)
            due_save = last or stop or step % config.checkpoint.every == 0
            if due_eval or due_save:
                # Metrics first: a run that must stop for a non-finite loss stops before anything is written. Waiting
                # for them here would shorten this window of the speed and lengthen the next, so it is not measured.
                report(*late, config, trackers, progress, None)
                late = None
                throughput.restart()
            if due_save:
                with goodput.spending("checkpoint"):
                    saved.save(step, state, about)
                goodput.saved(step)
                spool.flush()
            if chief and (due_save or step % config.train.log_every == 0):
                goodput.write(spool.local)
            if stop:
                break
            if due_eval:
                validate(step)
        with goodput.spending("checkpoint"):
            saved.wait()
        if chief:
            goodput.write(spool.local)
        progress.message(goodput.summary())
        if preemption.interrupted():
            progress.message(f"stopped by a signal, step {step} is saved; run the same command to resume")
            return preemption.exit_status

        # ---- the end
        if start == config.steps and not evaluated(spool.local, start):  # stopped between its last save and evaluation
            validate(start)
        trackers.close()
        if chief:
            plot_training(spool.local / "metrics.jsonl", workdir / "loss.png", title=config.name)
            told = terms(read_json_lines(spool.local / "metrics.jsonl"))
            plot_terms({config.name: told}, workdir / "terms.png", title=config.name)
            layer_stats.plot(layer_stats.newest(spool.local / "metrics.jsonl"), workdir / "last", title=config.name)
        progress.message(f"finished: {workdir} holds all {config.steps} steps; curves in {workdir / 'loss.png'}")
    return 0


def open_data(config) -> tuple[PackedRows, PackedRows]:
    """The rows to train on and those to validate on, prepared with this model's vocabulary and row length."""
    data = config.data
    if not data.path:
        raise UserError("config.data.path: is empty; name a directory written by mesanet_jax.prepare")
    rows = PackedRows(data.path, data.split)
    for field, wanted, given in (
        ("data.seq_len", data.seq_len, rows.seq_len),
        ("model.vocab_size", config.model.vocab_size, rows.vocab_size),
    ):
        if wanted != given:
            remedy = f"set --config.{field}={given} or prepare the data again"
            raise UserError(f"config.{field}={wanted}, but {data.path} was prepared with {given}; {remedy}")
    return rows, PackedRows(data.path, data.validation_split)


def initial_state(config, program, model, saved: checkpoint_lib.Checkpoints, about: dict) -> tuple:
    """The state to continue from and its step: the newest checkpoint that can be read, else `init_from`'s weights, else fresh."""
    steps = saved.steps()
    while steps:
        try:
            return resumed(config, program, saved, about, step=steps[-1]), steps[-1]
        except checkpoint_lib.Damaged as error:
            if len(steps) == 1:
                raise UserError(f"{error}; there is no other: remove it to begin anew") from error
            text = f"{error}; it is moved to {saved.set_aside(steps.pop())}, the one before is of step {steps[-1]}"
            if jax.process_count() > 1:  # the others may have read theirs: the launcher starts all again
                distributed.end(distributed.LOST, f"error: {text}; start again")
            print(f"warning: {text}", file=sys.stderr, flush=True)
    state = program.init(jax.random.key(config.seed))
    if config.checkpoint.init_from is not None:
        weights, _ = checkpoint_lib.restore_params(workdir_lib.path(config.checkpoint.init_from), model, program.mesh)
        state = {**state, "params": weights}
    return state, 0


def resumed(config, program, saved: checkpoint_lib.Checkpoints, about: dict, *, step: int):
    """The state of a checkpoint, whose data are those of now."""
    before = saved.about(step)["data"]
    if before != about["data"]:
        raise UserError(
            f"the data differ from those this run began with: fingerprint {before} in the checkpoint, {about['data']} in {config.data.path}"
        )
    return saved.restore(step, program.state)


def evaluated(workdir: pathlib.Path, step: int) -> bool:
    """Whether the workdir's metrics have a validation of `step`."""
    records = read_json_lines(workdir / "metrics.jsonl")
    return any(record["step"] == step and "validation_loss" in record for record in records)


def report(step: int, metrics: dict, config, trackers, progress, throughput: Throughput | None) -> None:
    """Fetches the metrics of a step, logs them when due, and stops the run if the step was no good.

    Raises:
      SystemExit: with status 1, on a non-finite loss that the config does not let pass.
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
            f"step {step}: loss {scalars['loss']}, gradient norm {scalars['grad_norm']}: these or the updated parameters"
            f" are not finite ({skipped} in a row); the update was not applied, the last checkpoint is good."
            " Lower config.optimizer.learning_rate, or set config.train.nonfinite=skip"
        )
    if skipped:
        progress.message(f"step {step}: not finite, update skipped")


def banner(config, model, program, rows: PackedRows, flops_per_token: float) -> str:
    """What runs where, in one paragraph."""
    devices = program.mesh.devices
    layout = " x ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items())
    epochs = config.steps * config.data.batch_size / len(rows)
    return (
        f"{config.name}: {model.parameter_count() / 1e6:.1f}M parameters on {devices.size} {devices.flat[0].device_kind} ({layout})\n"
        f"{config.steps} steps of {config.data.batch_size} x {config.data.seq_len} tokens"
        f" ({config.steps * config.data.batch_size * config.data.seq_len / 1e9:.3g}B, {epochs:.2g} epochs of {len(rows)} rows),"
        f" accumulation {program.accumulation}, {flops_per_token / 1e9:.3g} GFLOP a token"
    )


class Interrupted(Exception):
    """A signal came during an evaluation, whose partial result is dropped."""


class Profiler:
    """A trace of steps [start, start + steps), written to workdir/profile for TensorBoard or Perfetto."""

    def __init__(self, config, workdir: pathlib.Path):
        self._start, self._steps = config.profile.start, config.profile.steps
        self._directory, self._running = workdir / "profile", False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._running:
            jax.profiler.stop_trace()

    def at(self, step: int) -> None:
        if self._start is None:
            return
        if step == self._start:
            jax.profiler.start_trace(str(self._directory))
            self._running = True
        elif self._running and step == self._start + self._steps:
            jax.profiler.stop_trace()
            self._running = False


if __name__ == "__main__":
    cli.run(main)
