"""GLA as MesaNet (arXiv 2506.05233) compares with it: gated linear attention, one decay a head, in every block."""

from configs.backbone import backbone

PEAK_LEARNING_RATE = {"140m": 2e-3, "440m": 2.5e-3, "1b": 2e-3}  # Table 8, 15B tokens


def get_config(size: str = "140m"):
    config = backbone("gla", size, ("gla",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(size, config.optimizer.learning_rate)
    return config
