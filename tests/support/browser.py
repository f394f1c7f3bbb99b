"""Shows a page in Chromium, and reports what is wrong with it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 120
# Reports what is wider than the place that it has, and of which color the paper is.
REPORT = """
<script>
const faults = [];
const root = document.documentElement;
if (root.scrollWidth > root.clientWidth) faults.push("page " + root.scrollWidth);
for (const text of document.querySelectorAll("svg text")) {
  const box = text.getBBox(), all = text.ownerSVGElement.viewBox.baseVal;
  if (box.x < 0 || box.y < 0 || box.x + box.width > all.width || box.y + box.height > all.height)
    faults.push(text.textContent);
}
for (const element of document.querySelectorAll("td, th, h1, h2, dd, li, p"))
  if (element.scrollWidth > element.clientWidth + 1) faults.push(element.textContent);
// On a narrow screen, tables scroll by themselves.
if (innerWidth > 1300)
  for (const element of document.querySelectorAll(".wide"))
    if (element.scrollWidth > element.clientWidth) faults.push(element.textContent);
const report = document.createElement("pre");
report.id = "report";
report.textContent = JSON.stringify({
  faults, paper: getComputedStyle(document.body).backgroundColor, width: innerWidth,
});
document.body.append(report);
</script>
"""


def find_browser() -> str | None:
    """Returns the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def show(page: str, folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Opens the page in a browser; returns its report, and what its console says."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", f"{REPORT}</body>"))
    command = [
        find_browser() or BROWSERS[0],
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
    ]
    command += [f"--user-data-dir={folder / 'profile'}", *options, "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert shown.returncode == 0, shown.stderr
    found = re.search(r'<pre id="report">(.*?)</pre>', shown.stdout, re.DOTALL)
    assert found is not None, shown.stdout[-2000:]
    console = "\n".join(line for line in shown.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(unescape(found[1])), console
