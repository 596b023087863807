"""What a chip costs: a table the user edits (`mesanet_jax/aot/prices.toml`)."""

import dataclasses
import pathlib
import tomllib

from mesanet_jax.errors import UserError

PRICES = pathlib.Path(__file__).with_name("prices.toml")


@dataclasses.dataclass(frozen=True)
class Price:
    """Dollars a chip and hour, with where and when that was said."""

    dollars: float
    source: str
    date: str

    def per_billion_tokens(self, tokens_per_second: float, *, chips: int) -> float:
        """Dollars for 1e9 tokens at that speed over all `chips`."""
        return self.dollars * chips * 1e9 / tokens_per_second / 3600


def load(path: pathlib.Path, chip: str) -> Price | None:
    """The price of a chip, None if the table has none.

    Raises:
      UserError: there is no such table, or it is malformed.
    """
    try:
        table = tomllib.loads(path.read_text())
        return None if chip not in table else Price(**table[chip])
    except OSError as error:
        raise UserError(f"--prices={path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise UserError(f"--prices={path}: {error}; a chip has dollars, source and date, see {PRICES.name}") from error
