"""Linear recurrences whose state is a matrix, computed in chunks: what Mesa, GLA, the delta rule and mLSTM share."""
