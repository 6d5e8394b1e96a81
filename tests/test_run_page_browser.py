"""The page of `eps-proto run --plot` in a real browser: wide and on a phone, light and dark."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, chromium
from command import last, outcome
from test_run_page import PROMPT, STEPS, line, made_up

from eps_core.report.run_page import run_page

SECTIONS = ["tokens", "kl", "bytes", "time", "run"]
# what is wider than the window, but for what scrolls by itself
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(one => {
  const box = one.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 0.5 || box.left < -0.5)
    && !one.closest('.scroll, .text, .tabs > input');
}).map(one => one.outerHTML.slice(0, 120))"""
PANELS = """[...document.querySelectorAll('section')].filter(one => {
  const box = one.getBoundingClientRect();
  return box.width > 200 && box.height > 80 && one.querySelector('h2').textContent;
}).map(one => one.id)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("no Chromium is installed")
    with Browser(program) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of a run, and one of a large model at 32k tokens."""
    folder = tmp_path_factory.mktemp("pages")
    last(outcome(line(model, "numpy", "--plot", "run.html"), folder))
    (folder / "large.html").write_text(run_page(made_up(32_768)))
    return {name: folder / f"{name}.html" for name in ("run", "large")}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("name", ["run", "large"])
def test_every_panel_is_there_and_nothing_is_wider_than_the_window(
    name: str, width: int, scheme: str, browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    browser.open(pages[name], width, scheme)
    assert browser.run("innerWidth") == width
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(TOO_WIDE) == []
    assert browser.run(PANELS) == SECTIONS
    assert "of its KV cache where dense attention reads" in browser.run("document.querySelector('h1').innerText")
    colour = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, colour[4:-1].split(","))) > 600) == (scheme == "light")
    for map_name, shown in (("layers", "steps"), ("steps", "layers")):
        browser.run(f"document.getElementById('show-{map_name}').click()")
        sizes = [
            browser.run(f"document.querySelector('#map-{one} .cells').getBoundingClientRect().height")
            for one in (map_name, shown)
        ]
        assert sizes[0] > 100 and sizes[1] == 0
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    if (folder := os.environ.get("EPS_TEST_PICTURES")) is not None:  # to look at
        (tmp_path / "page.png").rename(Path(folder) / f"{name}-{width}-{scheme}.png")
    assert browser.errors == []


def test_a_cell_is_read_by_pointer_and_keys(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"], 1200, "light")
    said = "document.getElementById('read-layers').textContent"
    browser.run("document.querySelector('#map-layers .cells').scrollIntoView({block: 'center'})")
    box = "document.querySelector('#map-layers .cells').getBoundingClientRect()"
    left, top, height = (browser.run(f"{box}.{side}") for side in ("left", "top", "height"))
    browser.point(left + 1, top + 1)
    # the sink tokens
    assert browser.run(said) == f"layer 0, prompt token 1: read by 100 % “{PROMPT[0]}”"
    browser.point(left + 1, top + height - 1)
    browser.run("document.querySelector('#map-layers .cells').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowUp"):
        browser.key(key)
    assert browser.run(said) == f"layer 0, prompt token 3: read by 100 % “{PROMPT[2]}”"
    assert browser.run("[...document.querySelectorAll('#text .on')].map(one => one.textContent)") == [PROMPT[2]]
    browser.run("document.getElementById('show-steps').click()")
    browser.run("document.querySelector('#map-steps .cells').focus()")
    for _ in range(STEPS + 1):  # the last row is the end
        browser.key("ArrowDown")
    browser_said = browser.run("document.getElementById('read-steps').textContent")
    assert browser_said.startswith(f"new token {STEPS} “") and "prompt token 1: read by 100 %" in browser_said
    browser.run("document.getElementById('text').scrollIntoView({block: 'center'})")
    piece = "document.getElementById('text').children[1].getBoundingClientRect()"
    browser.point(*(browser.run(f"{piece}.{side}") + 2 for side in ("left", "top")))
    assert browser.run("document.getElementById('read-text').textContent").startswith("Prompt token 2: read by 100 %")
    assert browser.errors == []


def test_the_browser_says_what_is_wrong(browser: Browser, tmp_path: Path) -> None:
    """The checks above can fail."""
    page = tmp_path / "wrong.html"
    page.write_text("<div style='width:2000px'>x</div><script>nothing()</script>")
    browser.open(page, 390, "light")
    assert browser.run(TOO_WIDE) and any("nothing is not defined" in one for one in browser.errors)
