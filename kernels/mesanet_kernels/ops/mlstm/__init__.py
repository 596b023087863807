"""mLSTM, the matrix LSTM of xLSTM."""
