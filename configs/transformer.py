"""The Transformer baseline of the MesaNet paper: softmax attention with RoPE in every block."""

from mesanet_jax.recipes.backbone import backbone

PEAK_LEARNING_RATE = {"140m": 2.5e-3, "440m": 1.5e-3, "1b": 2e-3}  # Table 8, 15B tokens


def get_config(size: str = "140m"):
    config = backbone("transformer", size, ("attention",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(size, config.optimizer.learning_rate)
    return config
