"""Sequence-mixing ops for JAX on TPU, GPU and CPU.

They are pure functions of arrays. Their docstrings say what they compute; docs/kernels.md lists them.
"""

from mesanet_kernels.dispatch import implementations
from mesanet_kernels.documents import document_starts, state_resets
from mesanet_kernels.ops.attention.api import attention
from mesanet_kernels.ops.attention.cache import AttentionState, attention_extend, attention_step, init_attention_state
from mesanet_kernels.ops.causal_conv1d.api import causal_conv1d, causal_conv1d_step
from mesanet_kernels.ops.delta_rule.api import delta_rule, delta_rule_step
from mesanet_kernels.ops.diagonal_ssm.api import diagonal_ssm, diagonal_ssm_step
from mesanet_kernels.ops.gated_linear_attention.api import gated_linear_attention, gated_linear_attention_step
from mesanet_kernels.ops.linear_scan.api import linear_scan, linear_scan_step
from mesanet_kernels.ops.mesa.api import MESA_SOLUTION, MesaOutput, mesa, mesa_step
from mesanet_kernels.ops.mlstm.api import mlstm, mlstm_step
from mesanet_kernels.ops.softmax_cross_entropy.api import softmax_cross_entropy
from mesanet_kernels.partition import mesh_axes

__all__ = [
    "MESA_SOLUTION",
    "AttentionState",
    "MesaOutput",
    "attention",
    "attention_extend",
    "attention_step",
    "causal_conv1d",
    "causal_conv1d_step",
    "delta_rule",
    "delta_rule_step",
    "diagonal_ssm",
    "diagonal_ssm_step",
    "document_starts",
    "gated_linear_attention",
    "gated_linear_attention_step",
    "implementations",
    "init_attention_state",
    "linear_scan",
    "linear_scan_step",
    "mesa",
    "mesa_step",
    "mesh_axes",
    "mlstm",
    "mlstm_step",
    "softmax_cross_entropy",
    "state_resets",
]
