"""The same ops of flash-linear-attention (PyTorch, Triton), on the same inputs, for comparison alone.

Needs torch, triton and flash-linear-attention, which mesanet-jax itself does not.
"""

import statistics
import time

import ml_dtypes
import numpy as np

# Ours -> theirs. Gates are log decays in both, and q is not scaled. Where theirs has no beta, the values contain it.
OPS = {
    "mesa": lambda x, iters: _fla("mesa_net", "chunk_mesa_net")(
        x["q"], x["k"], x["v"], x["log_decay"], x["beta"], x["lam"], max_CG_iteration=iters
    ),
    "gated_linear_attention": lambda x, _: _fla("simple_gla", "chunk_simple_gla")(
        x["q"], x["k"], _gated(x), x["log_decay"], scale=1.0
    ),
    "gated_linear_attention_vector": lambda x, _: _fla("gla", "chunk_gla")(
        x["q"], x["k"], _gated(x), x["log_decay"], scale=1.0
    ),
    "delta_rule": lambda x, _: _fla("gated_delta_rule", "chunk_gated_delta_rule")(
        x["q"], x["k"], x["v"], x["log_decay"], x["beta"], scale=1.0
    ),
}


def _fla(module: str, name: str):
    import importlib

    return getattr(importlib.import_module(f"fla.ops.{module}"), name)


def _gated(x):
    return (x["v"] * x["beta"][..., None]).to(x["v"].dtype)


def measure(op: str, inputs: dict, cotangent, *, repeats: int, max_iters: int) -> dict | None:
    """Milliseconds, peak memory, and (output, gradients) as numpy; None where there is no such op."""
    if op not in OPS:
        return None
    import torch

    x = {name: _tensor(array) for name, array in inputs.items()}
    do = _tensor(cotangent)
    call = lambda: OPS[op](x, max_iters)[0]
    torch.cuda.empty_cache()
    with torch.no_grad():
        forward_ms = _median_ms(call, repeats)
    for tensor in x.values():
        tensor.requires_grad_(tensor.is_floating_point())
    wanted = [tensor for tensor in x.values() if tensor.requires_grad]

    def both():
        output = call()
        return output.detach(), torch.autograd.grad(output, wanted, do.to(output.dtype))

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    milliseconds = _median_ms(both, repeats)
    peak = torch.cuda.max_memory_allocated() - before
    output, gradients = both()
    named = dict(zip([name for name, tensor in x.items() if tensor.requires_grad], gradients, strict=True))
    results = _array(output), {name: _array(gradient) for name, gradient in named.items()}
    return dict(forward_ms=forward_ms, forward_backward_ms=milliseconds, scratch_mib=peak / 2**20, results=results)


def _median_ms(call, repeats: int) -> float:
    import torch

    for _ in range(3):  # compiles and tunes
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def _tensor(array):
    """By way of the bits, since numpy has no bfloat16 of its own."""
    import torch

    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).astype(np.int32)).to(torch.uint16).view(torch.bfloat16).cuda()
    return torch.from_numpy(array).cuda()


def _array(tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
