"""The committed page of options and variables says what the tables say."""

from __future__ import annotations

from pathlib import Path

from deepinfer.config.docs import configuration_page, main
from deepinfer.config.env import VARIABLES
from deepinfer.config.options import FOREIGN, OPTIONS

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_committed_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == configuration_page(), "run `make docs` and commit docs/configuration.md"


def test_page_names_everything():
    page = configuration_page()
    for name in [item.name for item in (*OPTIONS, *FOREIGN)] + [variable.full_name for variable in VARIABLES]:
        assert f"`{name}`" in page


def test_main_writes_the_page(tmp_path, capsys):
    assert main([str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == configuration_page()
    assert main([]) == 0
    assert capsys.readouterr().out == configuration_page()
