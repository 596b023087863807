"""xLSTM (arXiv 2405.04517): an mLSTM in every block, as MesaNet compares it."""

from configs.backbone import backbone

PEAK_LEARNING_RATE = {"140m": 2.5e-3, "440m": 3e-3, "1b": 1.5e-3}  # Table 8, 15B tokens


def get_config(size: str = "140m"):
    config = backbone("xlstm", size, ("mlstm",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(size, config.optimizer.learning_rate)
    return config
