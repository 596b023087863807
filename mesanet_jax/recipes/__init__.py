"""The parts of runs that several configs share. A config outside this repository can import them too."""
