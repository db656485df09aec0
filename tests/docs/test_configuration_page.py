"""`docs/configuration.md` is what the settings say today."""

from __future__ import annotations

from pydantic import BaseModel, Field

from docs import generate_configuration as generate
from pipeline.settings import Settings


def test_the_page_is_current() -> None:
    assert generate.PAGE.read_text(encoding="utf-8") == generate.page()


def test_every_setting_is_on_it() -> None:
    text = generate.page()
    assert set(Settings.model_fields) <= set(generate.sections())
    for section in generate.sections().values():
        assert all(f"| `{name}` |" in text for name in section.model_fields)


class Base(BaseModel):
    first: int = 1  # inherited


class Sample(Base):
    """A section."""

    plain: str = "a # b"  # with a # in it
    bounded: int = Field(
        5,
        gt=0,  # on its own line
    )
    large: int = 8 << 20
    needed: str
    many: tuple[str, ...] = ("x", "y")
    either: int | None = None  # a | b


def test_a_table_row_by_row() -> None:
    assert generate.table(Sample)[2:] == [
        "| `first` | integer | `1` | inherited |",
        "| `plain` | text | `a # b` | with a # in it |",
        "| `bounded` | integer, above 0 | `5` | on its own line |",
        "| `large` | integer | `8_388_608` (8 MiB) |  |",
        "| `needed` | text | **required** |  |",
        "| `many` | list of text | `x`, `y` |  |",
        "| `either` | integer or none | none | a \\| b |",
    ]
