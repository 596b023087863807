"""Which cases of the large parametrised tests `make test` runs; their other cases are slow (`make test-all`).

Nearly all the time of the suite is compilation. A contract test runs over every mixer, op or config, but many of these
compile nearly the same program, so a few representatives stay in the fast set and `make test-all` runs all of them.
A test that is listed with no case is slow as a whole: its docstring or a faster test near it holds the same property.
"""

OPS = ("mesa", "delta_rule", "linear_scan", "attention")  # one for each way to compute a chunk
MIXERS = ("attention", "gated_deltanet", "gla", "gss", "hawk", "mesa", "mlstm")  # one for each kernel and kind of layer

# Test (file and function) -> the cases, by the text in brackets of their test id, that stay in the fast set.
REPRESENTATIVES: dict[str, tuple[str, ...]] = {
    "inference/test_sampler.py::test_prefill_chunk_does_not_matter": ("mesa",),
    "kernels/test_op_accuracy.py::test_any_length_and_chunk": (
        *("mesa-1-16", "mesa-17-3", "gated_linear_attention-2-1", "gated_linear_attention_vector-17-3"),
        *("delta_rule-1-16", "delta_rule-17-3"),
    ),
    "kernels/test_op_accuracy.py::test_bfloat16_inputs": (*OPS, "gated_linear_attention_vector", "mlstm"),
    "kernels/test_op_accuracy.py::test_float32": (
        *("mesa-ragged", "gated_linear_attention-ragged", "gated_linear_attention_vector-ragged"),
        *("delta_rule-ragged", "causal_conv1d-ragged", "linear_scan-ragged", "diagonal_ssm-ragged"),
        *("mlstm-ragged", "attention-ragged", "softmax_cross_entropy-ragged"),
    ),
    "kernels/test_op_accuracy.py::test_float64_agrees_to_rounding": ("mesa", "delta_rule", "diagonal_ssm"),
    "kernels/test_op_accuracy.py::test_values_narrower_than_keys": ("mesa", "mlstm"),
    "kernels/test_op_causal_conv1d_gpu.py::test_documents_across_blocks_keep_apart": ("bfloat16-0.005",),
    "kernels/test_op_causal_conv1d_gpu.py::test_kernels_are_the_convolution": ("sizes1-boundaries1-silu",),
    "kernels/test_op_decode.py::test_32768_steps_do_not_drift": ("mesa",),
    "kernels/test_op_decode.py::test_recurrent_ops": (
        *("mesa-xla", "gated_linear_attention-xla", "gated_linear_attention_vector-xla", "delta_rule-xla"),
        *("causal_conv1d-xla", "linear_scan-xla", "diagonal_ssm-xla", "mlstm-xla", "mesa-reference"),
    ),
    "kernels/test_op_delta_rule.py::test_errors_do_not_accumulate": ("bfloat16-0.005",),
    "kernels/test_op_diagonal_ssm.py::test_a_token_repeated_4096_times": ("fft",),
    "kernels/test_op_diagonal_ssm.py::test_any_length_and_chunk": ("1-None", "17-16"),
    "kernels/test_op_diagonal_ssm.py::test_memory_holds_no_state_per_token": ("xla",),
    "kernels/test_op_diagonal_ssm.py::test_slow_and_fast_modes": ("xla",),
    "kernels/test_op_documents.py::test_a_perturbed_document_changes_no_other": (*OPS, "mlstm", "diagonal_ssm"),
    "kernels/test_op_documents.py::test_documents_equal_separate_sequences": (*OPS, "mlstm", "causal_conv1d"),
    "kernels/test_op_gated_linear_attention.py::test_a_token_repeated_4096_times": (
        "None-1e-05-gated_linear_attention_vector",
    ),
    "kernels/test_op_gla_gpu.py::test_segments": (),
    "kernels/test_op_gla_tpu.py::test_outputs_and_gradients": ("strict-odd",),
    "kernels/test_op_mesa_gpu.py::test_solves": ("one token repeated",),
    "kernels/test_op_mesa_tpu.py::test_solves": ("one token repeated",),
    "kernels/test_op_mlstm.py::test_any_length_and_chunk": ("17-4",),
    "kernels/test_op_sequence_parallel.py::test_rows_over_four_devices": ("delta_rule-options0", "attention-options3"),
    "kernels/test_op_sharding.py::test_forward_and_backward_gather_nothing": (
        *("mesa-options0", "delta_rule-options3", "attention-options8", "softmax_cross_entropy-options9"),
    ),
    "kernels/test_op_sharding.py::test_memory_is_linear_in_time": ("mesa", "attention"),
    "mixers/test_adding_a_family.py::test_it_trains": (),
    "mixers/test_decode_long.py::test_decoding_32768_tokens_does_not_drift": ("mesa",),
    "mixers/test_gss.py::test_memory_of_32k_tokens": (),
    "mixers/test_implementation.py::test_the_reference_is_the_reference_everywhere": ("mesa", "gla", "mlstm"),
    "mixers/test_mixers.py::test_a_document_does_not_know_its_place": MIXERS,
    "mixers/test_mixers.py::test_a_token_repeated_4096_times": (
        *("mesa-bfloat16", "mesa_unconverged-float32", "gated_deltanet-bfloat16", "mlstm-bfloat16"),
    ),
    "mixers/test_mixers.py::test_bfloat16": ("gated_deltanet", "gss", "mesa", "mlstm"),
    "mixers/test_mixers.py::test_documents_are_kept_apart": (*MIXERS, "mamba2_published"),
    "mixers/test_mixers.py::test_training_is_prefill_and_steps": (
        *("attention", "deltanet", "gated_deltanet", "gla", "gss", "hawk", "mesa", "mlstm", "sliding"),
        *("gla_published", "mamba2_published", "mesa_unconverged"),
    ),
    "mixers/test_published.py::test_every_option_matters": (),
    "mixers/test_published.py::test_flops_are_those_the_compiler_counts": (),
    "models/test_language_model.py::test_layers_without_a_loop_change_nothing": ("mesanet",),
    "models/test_language_model.py::test_remat_saves_memory_and_changes_nothing": ("mesanet",),
    "models/test_memory_run.py::test_evaluation_prints_both_and_sweeps_are_exact": (),
    "models/test_pha.py::test_bfloat16_activations": ("parallel",),
    "models/test_pha.py::test_every_layer_learns_its_mixtures": (),
    "models/test_pha.py::test_every_reading_computes_something_else": (),
    "models/test_pha.py::test_flops_are_those_the_compiler_counts": (),
    "models/test_pha.py::test_trains_without_warm_up_and_clipping": (),
    "models/test_tail.py::test_a_tail_computes_what_groups_do": ("mixer",),
    "models/test_zoo.py::test_the_loss_is_that_of_decoding": (
        *("griffin-smoke", "hawk_mesa-smoke", "xlstm-smoke-published", "pha-smoke", "lrt-smoke"),
    ),
    "runtime/test_processes.py::test_two_then_one_then_four_processes": (),
    "runtime/test_processes.py::test_a_workdir_that_is_not_shared": (),
    "test_flops.py::test_flops_are_those_the_compiler_counts": ("mesa", "attention"),
    "training/test_checkpoint.py::test_restores_to_the_bit_on_any_mesh": (
        *("(1, 1, 1)-(8, 1, 1)", "(2, 4, 1)-(4, 1, 2)", "(8, 1, 1)-(2, 2, 2)"),
    ),
    "training/test_step.py::test_every_mesh_computes_the_same": ("(2, 2, 2)-mesanet",),
}
