"""What the Pallas kernels of one platform share: gpu.py for NVIDIA Hopper, tpu.py for TPUs."""
