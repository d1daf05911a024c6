"""Sphinx configuration. The build needs no network, and neither do the built pages."""

import sys
from functools import partial
from pathlib import Path

from pfl_sklearn import __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import docstrings

project = "pfl-sklearn"
author = "pfl-sklearn developers"
copyright = author
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "sphinx_gallery.gen_gallery",
    "mathml",
    "docstrings",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "auto_examples/**GALLERY_HEADER.rst"]
default_role = "literal"
nitpicky = False

autosummary_generate = True
# Sphinx does not store plain functions.
autosummary_context = {"properties_of": partial(docstrings.properties_of)}
autodoc_typehints = "none"
toc_object_entries_show_parents = "hide"
# Pages of classes list their members themselves (_templates/autosummary/class.rst).
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "auto_examples",
    "filename_pattern": "/plot_",
    "ignore_pattern": r"^(?!plot_)",
    "subsection_order": [
        f"../examples/{folder}"
        for folder in ("first_analyses", "further_analyses", "privacy", "networks")
    ],
    "within_subsection_order": "FileNameSortKey",
    "doc_module": "pfl_sklearn",
    "backreferences_dir": "generated/backreferences",
    "reference_url": {"pfl_sklearn": None},
    "thumbnail_size": (600, 420),
    "image_srcset": ["2x"],
    "write_computation_times": False,
    "parallel": 2,  # examples at a time
    "show_memory": False,
    "ignore_repr_types": r"matplotlib[.].*|pfl_sklearn[.]inspection.*",  # addresses say nothing
    "show_signature": False,
    "abort_on_example_error": False,
    "remove_config_comments": True,
}

html_theme = "pydata_sphinx_theme"
html_title = f"pfl-sklearn {release}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "pfl-sklearn"},
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 6,  # all of them
    "navbar_persistent": ["search-button"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "show_prev_next": False,
}
# The first three have no pages below them; the names below the API are on its page.
html_sidebars = {page: [] for page in ("index", "getting_started", "comparison", "papers", "api")}
