"""Samples text from a checkpoint: `python -m mesanet_jax.generate --workdir=DIR --prompt="It is a truth"`

The text goes to stdout as it is drawn; speed and the size of the decoding state go to stderr. The same seed gives the
same text, and a sample does not depend on how many samples are drawn. `--prompt=-` reads the prompt from stdin; with an
empty prompt, the text is a new document.
"""

import argparse
import itertools
import pathlib
import sys
import time
from collections.abc import Iterator

import jax

from mesanet_jax import cli, models
from mesanet_jax import mesh as mesh_lib
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.inference.sampler import Sampler, state_bytes
from mesanet_jax.inference.sampling import Sampling
from mesanet_jax.inference.stream_decoder import StreamDecoder
from mesanet_jax.runtime import workdir
from mesanet_jax.schema import Config
from mesanet_jax.training import checkpoint
from mesanet_jax.training.data import check_tokenizer


def main(argv: list[str]) -> None:
    args, overrides = cli.parse(_flags(), argv)
    for name in ("max_tokens", "num_samples", "prefill_chunk"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)}: must be at least 1")
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    config = workdir.load(args.workdir, overrides)
    workdir.use_compile_cache(args.workdir, config)
    generate(args, config, sampling, read_prompt(args))


def _flags() -> argparse.ArgumentParser:
    flags = cli.parser(__doc__ or "")
    flags.add_argument("--workdir", required=True, type=workdir.path, help="directory of a run of mesanet_jax.train")
    flags.add_argument("--step", type=int, help="checkpoint to sample from (default: the newest)")
    flags.add_argument("--prompt", default="", help="text to continue; - reads it from stdin")
    flags.add_argument("--prompt_file", type=pathlib.Path, help="file that contains the text to continue")
    flags.add_argument(
        "--max_tokens", type=int, default=200, help="largest number of tokens to draw (default: %(default)s)"
    )
    flags.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="divides the logits; 0 always takes the most likely token (default: %(default)s)",
    )
    flags.add_argument(
        "--top_k",
        type=int,
        default=0,
        help="draw from this many of the most likely tokens; 0: from all (default: %(default)s)",
    )
    flags.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        help="draw from the fewest tokens that together have this probability (default: %(default)s)",
    )
    flags.add_argument("--seed", type=int, default=0, help="seed of the draws (default: %(default)s)")
    flags.add_argument("--num_samples", type=int, default=1, help="number of texts to draw (default: %(default)s)")
    flags.add_argument(
        "--prefill_chunk", type=int, default=256, help="prompt tokens that one call reads (default: %(default)s)"
    )
    return flags


def read_prompt(args: argparse.Namespace) -> str:
    """The text that --prompt or --prompt_file gives.

    Raises:
      UserError: if both are given, or the file cannot be read.
    """
    if args.prompt_file is None:
        return sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.prompt:
        raise UserError("--prompt and --prompt_file: give only one of them")
    try:
        return args.prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompt_file={args.prompt_file}: {error}") from error


def generate(args: argparse.Namespace, config: Config, sampling: Sampling, text: str) -> None:
    """Prints `text` and its continuations, drawn one after another from one prefilled state."""
    rows = PackedRows(config.data.path, config.data.split)
    prompt = prompt_ids(rows, text)
    stops = {rows.tokenizer.bos_id} | ({rows.tokenizer.eos_id} if rows.manifest["eos"] else set())
    mesh = mesh_lib.make_mesh((1, 1, 1), jax.devices()[:1])
    model = models.build(config.model)
    with mesh_lib.use_mesh(mesh):
        params, step = checkpoint.restore_params(args.workdir, model, mesh, step=args.step)
        check_tokenizer(rows, args.workdir, step=step)
        sampler = Sampler(model)
        max_length = len(prompt) + args.max_tokens
        logits_BV, state = sampler.prefill(params, prompt, max_length=max_length, chunk=args.prefill_chunk)
        for sample in range(args.num_samples):
            if args.num_samples > 1:
                print(f"--- sample {sample + 1} of {args.num_samples}")
            print(text, end="", flush=True)
            key = jax.random.fold_in(jax.random.key(args.seed), sample)
            endless = sampler.tokens(params, logits_BV, state, key=key, sampling=sampling)
            drawn = itertools.takewhile(lambda token: token not in stops, itertools.islice(endless, args.max_tokens))
            speed = print_text(drawn, StreamDecoder(rows.tokenizer.decode, prompt))
            print()
            print(f"{speed}; state of {state_bytes(state):,} bytes per sequence; step {step}", file=sys.stderr)


def prompt_ids(rows: PackedRows, text: str) -> list[int]:
    """The prompt's token ids, with BOS first if documents in the training data begin with it.

    Raises:
      UserError: if the prompt is empty and the data have no BOS.
    """
    ids = rows.tokenizer.encode([text])[0].tolist()
    if rows.manifest["bos"]:
        ids.insert(0, rows.tokenizer.bos_id)
    if not ids:
        raise UserError("--prompt: is empty, and these data have no BOS to begin a document with; give some text")
    return ids


def print_text(tokens: Iterator[int], decoder: StreamDecoder) -> str:
    """Prints the text of `tokens` as it becomes certain; returns their number and speed, without compilation."""
    count, began = 0, 0.0
    for token in tokens:
        print(decoder.push(token), end="", flush=True)
        count += 1
        if count == 1:
            began = time.monotonic()
    print(decoder.finish(), end="", flush=True)
    if count < 2:
        return f"{count} tokens"
    return f"{count} tokens, {(count - 1) / (time.monotonic() - began):.1f} tokens/s after the first"


if __name__ == "__main__":
    cli.run(main)
