"""The page in a real browser: its own script runs, no other does, and it has room."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest

from belady.report.html import page
from tests.unit.report.drawn import large_run, recorded, staged
from tests.unit.report.pages import Page, misnamed

BROWSER = shutil.which("chromium")
REQUIRED = bool(os.environ.get("BELADY_REQUIRE_BROWSER"))
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--virtual-time-budget=2000"),
)
# Tests that look inside need a script of their own, which the page's policy forbids.
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None and not REQUIRED, reason="no chromium on the PATH"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert BROWSER is not None, "BELADY_REQUIRE_BROWSER is set, but no chromium is on the PATH"
    return tmp_path


def opened(html: str, folder: Path, *options: str) -> str:
    """What the browser makes of a page."""
    source = folder / "page.html"
    source.write_text(html, "utf-8")
    profile = folder / "profile"
    command = [str(BROWSER), *QUIET, f"--user-data-dir={profile}", *options, source.as_uri()]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=True, env=environment
    )
    return done.stdout


def probed(html: str, script: str, folder: Path, *options: str) -> str:
    """The title of a page after a script of ours ran in it."""
    probe = POLICY.sub("", html).replace("</body>", f"<script>{script}</script></body>")
    found = re.search(r"<title>(.*?)</title>", opened(probe, folder, "--dump-dom", *options))
    assert found is not None
    return found.group(1)


def test_its_own_script_runs_and_no_name_does(folder: Path) -> None:
    html = page(misnamed(recorded()))
    read = Page(opened(html, folder, "--dump-dom"))
    assert [a for tag, a in read.tags if tag == "th" and a.get("tabindex") == "0"]
    assert read.names.count("script") == 1
    assert "<title>1</title>" not in read.html


def test_no_script_but_its_own_may_run(folder: Path) -> None:
    html = page(recorded()).replace("</body>", "<script>document.title = 'owned'</script></body>")
    assert "<title>owned</title>" not in opened(html, folder, "--dump-dom")


def test_modules_are_sorted_by_a_click(folder: Path) -> None:
    script = """
    const table = document.querySelector("table.sortable");
    const cells = () => [...table.tBodies[0].rows].map(row => +row.cells[1].dataset.v);
    const head = table.tHead.rows[0].cells[1];
    head.click(); const down = cells().join();
    head.click(); const up = cells().join();
    const sorted = cells().sort((a, b) => a - b);
    document.title = [up === sorted.join(), down === sorted.reverse().join(), up !== down].join();
    """
    assert probed(page(recorded()), script, folder) == "true,true,true"


@pytest.mark.parametrize("width", [400, 800, 1200])
@pytest.mark.parametrize("hostile", [False, True])
def test_nothing_sticks_out(width: int, hostile: bool, folder: Path) -> None:
    run = misnamed(recorded()) if hostile else staged()
    # A window of the browser has a least width; a frame has none.
    outer = f"""<!doctype html><title></title>
    <iframe style="border:0;width:{width}px;height:900px" srcdoc="{escape(page(run))}"></iframe>
    </body>"""
    script = """
    const frame = frames[0];
    frame.onload = () => {
      const seen = frame.document.documentElement;
      document.title = `${frame.innerWidth} ${seen.clientWidth} ${seen.scrollWidth}`;
    };
    """
    found = probed(outer, script, folder, "--window-size=1300,1000")
    inner, room, scrolled = map(int, found.split())
    assert inner == width
    assert scrolled <= room


def test_a_large_run_is_shown_and_sorted_at_once(folder: Path) -> None:
    script = """
    addEventListener("load", () => {
      const drawn = performance.now(), head = document.querySelectorAll("table.sortable th")[1];
      head.click();
      const room = document.documentElement, width = room.scrollWidth - room.clientWidth;
      const sorted = performance.now() - drawn;
      const charts = document.querySelectorAll("svg[role=img]").length;
      document.title = [charts, width, Math.round(drawn), Math.round(sorted)].join();
    });
    """
    charts, width, drawn_ms, sorted_ms = map(
        int, probed(page(large_run()), script, folder).split(",")
    )
    assert charts > 10
    assert width <= 0
    assert drawn_ms < 10_000
    assert sorted_ms < 2_000


@pytest.mark.parametrize("scheme", ["0", "1"])
def test_it_can_be_seen_light_and_dark(scheme: str, folder: Path) -> None:
    picture = folder / "page.png"
    script = 'document.title = getComputedStyle(document.body).backgroundColor.replaceAll(" ", "")'
    option = f"--blink-settings=preferredColorScheme={scheme}"
    dark = scheme == "0"
    expected = "rgb(21,23,26)" if dark else "rgb(253,253,251)"
    assert probed(page(recorded()), script, folder, option) == expected
    opened(page(recorded()), folder, option, f"--screenshot={picture}", "--window-size=1200,1600")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
