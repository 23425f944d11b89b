"""MkDocs hooks: README.md is the first page, source files that pages link to get pages, keys of the configuration
get anchors, and a page that would load something from another host fails the build."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[2]))  # MkDocs loads this file by its path

from tools.docs import pages


def _folder(uri: str) -> str:
    """Where a page of the site lies in the repository."""
    return "" if uri == "index.md" else str(Path("docs", uri).parent)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page and the source files."""
    readme = (pages.ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme))
    linked = set()
    for file in files.documentation_pages():
        linked |= pages.sources(file.content_string, _folder(file.src_uri))
    for path in sorted(linked - {"README.md"}):
        files.append(File.generated(config, pages.source_uri(path), content=pages.source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files into links to their pages."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    return pages.for_the_site(markdown, _folder(uri), uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give each key of the configuration an anchor, to which pages may link."""
    if page.file.src_uri != "configuration.md":
        return html
    html, anchors = pages.with_key_anchors(html)
    page.present_anchor_ids = (page.present_anchor_ids or set()) | set(anchors)
    return html


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that needs a network."""
    try:
        pages.check_site(Path(config.site_dir))
    except ValueError as error:
        raise PluginError(str(error)) from error
