"""Tests the times of kernels in a trace, by name and device."""

import jax
import pytest

from mesanet_jax.errors import UserError
from scripts.results import kernel_times

# A GPU's plane has everything twice: what each stream executed, and the modules that it was part of.
TRACE = """
planes { name: "/device:GPU:0"
  lines { name: "Stream #7(Compute)"
    events { metadata_id: 1 duration_ps: 2000000000 } events { metadata_id: 2 duration_ps: 4000000000 } }
  lines { name: "Stream #8(Compute)" events { metadata_id: 1 duration_ps: 1000000000 } }
  lines { name: "XLA Modules" events { metadata_id: 3 duration_ps: 9000000000 } }
  event_metadata { key: 1 value { id: 1 name: "solve_chunk" } }
  event_metadata { key: 2 value { id: 2 name: "gemm" } }
  event_metadata { key: 3 value { id: 3 name: "jit_train" } } }
planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 5000000000 } } }
"""


def write(directory, text):
    trace = directory / "plugins" / "profile" / "now" / "host.xplane.pb"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))


def test_kernels_of_a_device(tmp_path, capsys):
    write(tmp_path, TRACE)
    kernel_times.main([str(tmp_path), "--top=1"])
    printed = capsys.readouterr().out
    assert "/device:GPU:0: 7.0 ms in 2 kernels" in printed
    assert "| gemm   |     1 | 4.000 | 57.1 |" in printed and "solve_chunk" not in printed
    assert (tmp_path / "kernels.png").stat().st_size > 5000


def test_calls_of_one_kernel_count_together():
    (kernels,) = kernel_times.by_device(jax.profiler.ProfileData.from_text_proto(TRACE)).values()
    assert kernels == [("gemm", 1, 4.0), ("solve_chunk", 2, 3.0)]


def test_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="no trace .* train with --config.profile.start=STEP"):
        kernel_times.main([str(tmp_path)])
    write(tmp_path, 'planes { name: "/host:CPU" }')
    with pytest.raises(UserError, match="nothing that a GPU or a TPU executed"):
        kernel_times.main([str(tmp_path)])
