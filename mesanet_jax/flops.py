"""FLOPs of training, peaks of chips, and their quotient, model FLOPs utilisation (MFU).

Definition: the floating-point operations of matrix products (two a multiply-add) that the model needs, forward and
backward, with causal attention counted by the tokens a token sees (half of the full square), and a linear solve by all
its iterations, once forward and once backward. Recomputation
(rematerialisation) is not counted, nor are the embedding look-up and elementwise work.
"""

import dataclasses
from collections.abc import Sequence

import jax


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one token: of the forward pass, and of forward and backward together."""

    forward: float = 0.0
    training: float = 0.0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.forward + other.forward, self.training + other.training)

    def __mul__(self, count: float) -> "Flops":
        return Flops(count * self.forward, count * self.training)


def products(forward: float) -> Flops:
    """Matrix products: each has two of its size in the backward pass."""
    return Flops(forward, 3 * forward)


def solves(forward: float) -> Flops:
    """Linear solves with an implicit gradient: the backward pass solves once more."""
    return Flops(forward, 2 * forward)


def mean_context(seq_len: int, window: int | None) -> float:
    """Tokens that a token of a row sees in causal attention, itself included, on average."""
    span = min(window or seq_len, seq_len)
    return span - span * (span - 1) / (2 * seq_len)


# Dense bfloat16 TFLOP/s of one jax device, by the beginning of `device.device_kind`, the more specific one first.
# TPU: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}; NVIDIA: the data sheets, whose larger figures assume sparsity.
PEAK_TFLOPS = {
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5": 459.0,  # v5p calls itself "TPU v5"
    "TPU v6": 918.0,
    "NVIDIA A100": 312.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA GH200": 989.0,
}


def peak_flops(device: jax.Device) -> float | None:
    """FLOP/s of a device in dense bfloat16, or None for a chip that is not in the table."""
    return next((1e12 * peak for kind, peak in PEAK_TFLOPS.items() if device.device_kind.startswith(kind)), None)


def mfu(tokens_per_second: float, *, flops_per_token: float, devices: Sequence[jax.Device]) -> float | None:
    """The fraction of the devices' peak that `tokens_per_second` over all of them needs; None if it is not known."""
    peak = peak_flops(devices[0])
    return None if peak is None else tokens_per_second * flops_per_token / (peak * len(devices))
