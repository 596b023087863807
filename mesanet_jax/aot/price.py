"""Reads the price of a chip from a table that the user can edit (`mesanet_jax/aot/prices.toml`)."""

import dataclasses
import pathlib
import tomllib

from mesanet_jax.errors import UserError

PRICES = pathlib.Path(__file__).with_name("prices.toml")


@dataclasses.dataclass(frozen=True)
class Price:
    """Dollars per chip and hour, with the source and the date of the price."""

    dollars: float
    source: str
    date: str

    def per_billion_tokens(self, tokens_per_second: float, *, chips: int) -> float:
        """Returns the dollars for 1e9 tokens at the given speed of all `chips` together."""
        return self.dollars * chips * 1e9 / tokens_per_second / 3600


def load(path: pathlib.Path, chip: str) -> Price | None:
    """Returns the price of a chip; None if the table has none.

    Raises:
      UserError: the table does not exist or is malformed.
    """
    try:
        table = tomllib.loads(path.read_text())
        return None if chip not in table else Price(**table[chip])
    except OSError as error:
        raise UserError(f"--prices={path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise UserError(
            f"--prices={path}: {error}; each chip needs dollars, source and date, as in {PRICES.name}"
        ) from error
