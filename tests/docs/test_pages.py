"""Links, the navigation, the README's size, and what the built site would load.

Not covered: the build itself (`make docs`, strict, which CI runs).
"""

import re
from functools import cache
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from tests.docs.repository import PAGES, ROOT, folder, path_of, text
from tests.refuses import refuses
from tools.docs import pages


@cache
def anchors(page: Path) -> set[str]:
    """Where a link may lead on a page."""
    markdown = text(page)
    outside = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return {slugify(title.replace("`", ""), "-") for title in re.findall(r"^#+ (.*)$", outside, re.MULTILINE)}


def broken_links(markdown: str, page: Path) -> list[str]:
    broken = []
    for target in pages.links(markdown):
        if pages.is_external(target):
            continue
        path, anchor = pages.place(target, folder(page))
        there = ROOT / path if path else page
        if not there.is_file() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_links_lead_somewhere(page):
    assert broken_links(text(page), page) == []


def test_a_broken_link_is_found():
    page = ROOT / "docs" / "data.md"
    markdown = "[a](nowhere.md) [b](packing.md#nowhere) `[c](code.md)` [d](../README.md) [e](#rewards) [f](#nowhere)"
    assert broken_links(markdown, page) == ["nowhere.md", "packing.md#nowhere", "#nowhere"]


_ITEM = re.compile(r"( *)(?:[-*+]|\d+\.) ")


def glued_items(markdown: str) -> list[str]:
    """Items of lists that GitHub shows and the site does not.

    Python-Markdown takes an item for a part of the paragraph above it if no empty line is between them, and nests by
    four spaces.
    """
    glued = []
    prose = re.sub(r"^ *(`{3,}|~{3,}).*?^ *\1.*?$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", prose):
        lines = [line for line in block.splitlines() if line.strip() and not line.startswith("#")]
        for line in lines:
            item = _ITEM.match(line)
            if item and (not _ITEM.match(lines[0]) or len(item[1]) % 4):
                glued.append(line)
    return glued


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_lists_are_lists_on_the_site(page):
    assert glued_items(text(page)) == []


def test_a_glued_item_is_found():
    assert glued_items("A list:\n- glued\n\n- item\n- item\n  longer\n    - nested\n  - flat\n# Title\n- item") == [
        "- glued", "  - flat"
    ]  # fmt: skip
    assert glued_items("1. item\n\n    its end\n2. glued\n\n```\ncode\n- code\n```") == ["2. glued"]


def test_every_page_is_in_the_navigation():
    """And nothing else is. The first page is README.md; the log is a lab book, which only links lead to."""
    listed = re.findall(r": ([\w/-]+\.md)$", text(ROOT / "mkdocs.yml"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages_of_docs = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}
    assert {"index.md", *pages_of_docs} - {"log.md"} == set(listed)


def test_links_out_of_docs_become_pages_of_the_site():
    markdown = "[a](../megarlhf/layout.py) [b](data.md#rewards) [c](../README.md) [d](https://x.y) `[e](../README.md)`"
    assert pages.sources(markdown, "docs") == {"megarlhf/layout.py", "README.md"}
    assert pages.for_the_site(markdown, "docs", "x/page.md") == (
        "[a](../source/megarlhf/layout.py.md) [b](../data.md#rewards) [c](../index.md) [d](https://x.y) "
        "`[e](../README.md)`"
    )
    assert pages.for_the_site("[a](docs/data.md)", "", "index.md") == "[a](data.md)"
    assert "def split_chunks" in pages.source_page("megarlhf/layout.py")
    assert pages.source_page("megarlhf/weights/README.md").startswith("# Weights")


def test_keys_of_the_configuration_have_anchors():
    """A key with two rows has one; the table above the reference, and cells that are not the first, have none."""
    row = "<tr>\n<td><code>{}</code></td>\n<td><code>x.y</code></td>\n</tr>\n"
    head, reference = row.format("algo.kl.coef"), "<!-- made by `x` -->\n"
    for key in ("algo.kl.coef", "algo.kl.coef", "ROLE.optim.lr", "SET.path", "rewards[].kind", "beta"):
        reference += row.format(key)
    html, anchors = pages.with_key_anchors(head + reference)
    assert html.startswith(head)
    assert re.findall(r'id="([^"]*)"', html) == [
        "algo.kl.coef", "actor.optim.lr", "against.optim.lr", "critic.optim.lr", "reference.optim.lr",
        "reward_model.optim.lr", "ROLE.optim.lr", "data.train.path", "data.validation.path", "data.test.path",
        "ptx.data.path", "SET.path", "rewards.kind", "beta",
    ]  # fmt: skip
    assert sorted(re.findall(r'id="([^"]*)"', html)) == sorted(anchors)
    links = re.findall(r'href="#([^"]*)"', html)
    assert links == ["algo.kl.coef", "ROLE.optim.lr", "SET.path", "rewards.kind", "beta"]


def test_the_search_of_the_site_loads_nothing_from_elsewhere():
    """The theme's plugin adds a script of another host unless it is given one with this name."""
    settings = text(ROOT / "mkdocs.yml")
    (script,) = re.findall(r"polyfills: \[(\S*iframe-worker\S*)\]", settings)
    assert re.search(r"^plugins: \[search, offline\]", settings, re.MULTILINE)
    assert "window.Worker" in text(ROOT / "docs" / script)


def test_the_readme_is_short_and_leads_to_what_people_ask():
    """Under 900 words; that it never ran on several GPUs is near the top."""
    readme = text(ROOT / "README.md")
    assert len(readme.split()) < 900
    assert "never run" in "\n".join(readme.splitlines()[:24])
    targets = pages.links(readme)
    for page in ("follow-one-token", "new-architecture", "new-advantage", "refusals", "configuration", "glossary"):
        assert f"docs/{page}.md" in targets


def test_resources_of_other_hosts_are_refused(tmp_path):
    with refuses("no pages"):
        pages.check_site(tmp_path)
    page, style = tmp_path / "index.html", tmp_path / "site.css"
    page.write_text('<a href="https://x.y">x</a><script src="assets/a.js"></script><img src="a.png">')
    style.write_text("body { background: url(a.png) }")
    pages.check_site(tmp_path)
    page.write_text('<script async src="https://cdn.z/a.js"></script><link rel=stylesheet href=//fonts.z/b.css>')
    style.write_text("@import 'https://c.z/c.css'; body { background: url(\"http://d.z/d.png\") }")
    with refuses("4 resources", "cdn.z", "fonts.z", "c.z", "d.z"):
        pages.check_site(tmp_path)
