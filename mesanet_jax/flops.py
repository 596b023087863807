"""Floating-point operations (FLOPs) of training, peaks of chips, and their quotient: model FLOPs utilisation (MFU).

What is counted: the operations of the matrix products that the model needs, two for each multiply-add, in the forward
and the backward pass. Causal attention counts only the tokens that a token sees (half of the full square). A linear
solve counts all of its iterations, once in the forward and once in the backward pass. Not counted: recomputation
(rematerialisation), the embedding look-up and elementwise work.
"""

import dataclasses
from collections.abc import Sequence

from mesanet_jax.mesh import Device


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs per token: of the forward pass, and of the forward and backward passes together."""

    forward: float = 0.0
    training: float = 0.0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.forward + other.forward, self.training + other.training)

    def __mul__(self, count: float) -> "Flops":
        return Flops(count * self.forward, count * self.training)


def products(forward: float) -> Flops:
    """Returns the FLOPs of matrix products; the backward pass has two products of the same size for each of them."""
    return Flops(forward, 3 * forward)


def solves(forward: float) -> Flops:
    """Returns the FLOPs of linear solves with an implicit gradient: the backward pass solves once more."""
    return Flops(forward, 2 * forward)


def mean_context(seq_len: int, window: int | None) -> float:
    """Returns how many tokens a token of a row sees on average in causal attention, itself included."""
    most = min(window or seq_len, seq_len)
    return most - most * (most - 1) / (2 * seq_len)


# Dense bfloat16 TFLOP/s of one JAX device, by the beginning of `device.device_kind`; more specific names come first.
# Sources: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e} and NVIDIA's data sheets, whose larger figures assume sparsity.
PEAK_TFLOPS = {
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5": 459.0,  # the name that v5p reports
    "TPU v6": 918.0,
    "NVIDIA A100": 312.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA GH200": 989.0,
}


def peak_flops(device: Device) -> float | None:
    """Returns a device's peak in dense bfloat16, in FLOP/s; None if the chip is not in the table."""
    return next((1e12 * peak for kind, peak in PEAK_TFLOPS.items() if device.device_kind.startswith(kind)), None)


def mfu(tokens_per_second: float, *, flops_per_token: float, devices: Sequence[Device]) -> float | None:
    """Returns the share of the devices' joint peak that `tokens_per_second` needs; None if the peak is not known.

    Args:
      tokens_per_second: over all devices together.
      flops_per_token: of what is measured, e.g. `Flops.training`.
      devices: all devices of the run; they are of one kind.
    """
    peak = peak_flops(devices[0])
    return None if peak is None else tokens_per_second * flops_per_token / (peak * len(devices))
