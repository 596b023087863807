"""The packages of the distribution; everything else is declared in pyproject.toml.

`configs/` stands at the top of the repository, where users look for it, and is installed as `mesanet_jax/configs`.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(".", include=["mesanet_jax", "mesanet_jax.*"]),
        *find_packages("kernels", include=["mesanet_kernels", "mesanet_kernels.*"]),
        "mesanet_jax.configs",
    ],
    package_dir={"mesanet_kernels": "kernels/mesanet_kernels", "mesanet_jax.configs": "configs"},
)
