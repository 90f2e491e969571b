"""A hook of mkdocs: README.md is the site's first page, and LOG.md is a page of it."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HOME = Path(__file__).parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the two pages that lie outside docs/."""
    for source, target in (("README.md", "index.md"), ("LOG.md", "LOG.md")):
        text = (HOME / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links relative to docs/, where every page of the site is."""
    return text.replace("](docs/", "](").replace('src="docs/', 'src="').replace("](../LOG", "](LOG")
