"""Pages: a page may run its own styles and scripts and nothing else."""

import base64
import hashlib
import re
from html import unescape

from semaug.report.html import environment, policy_of, render_page


def test_a_page_may_use_its_own_styles_and_scripts_and_nothing_else() -> None:
    fragments = "<style>.x { color: red }</style><script>1 + 1</script>"
    page = render_page(environment(), "base.html", script="sort.js", fragments=fragments, title="<b>")
    policy = policy_of(page)
    style, script = (re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[0] for tag in ("style", "script"))
    wanted = {"style-src": [style, ".x { color: red }"], "script-src": [script, "1 + 1"]}
    for name, texts in wanted.items():
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert f"{name} 'sha256-{digests[0]}' 'sha256-{digests[1]}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "<title>&lt;b&gt;</title>" in page
    assert "script-src 'none'" in unescape(render_page(environment(), "base.html", title=""))


def test_a_dark_page_has_a_colour_for_each_colour_of_the_charts() -> None:
    style = environment().get_template("style.css").render()
    light, dark = (
        set(re.findall(r"--(\w+): #", part)) for part in re.split(r"@media \(prefers-color-scheme", style)[:2]
    )
    used = set(re.findall(r"(?:fill|stroke): var\(--(\w+)\)", style))
    assert len(used) == 13
    assert used <= light
    assert used <= dark
