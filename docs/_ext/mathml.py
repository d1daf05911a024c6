"""Mathematics as MathML, which browsers draw themselves: no script, no fonts, no network."""

import re
from html import unescape
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

logger = logging.getLogger(__name__)
# What docutils does not know, and the space around names of functions that it leaves out.
_REPAIRS = [
    (re.compile(r"\\dots(?![A-Za-z])"), r"\\ldots"),
    (re.compile(r"(?<=[\w}])\s+\\log(?![A-Za-z])"), r"\\,\\log"),
    (re.compile(r"\\log\s+(?![(])"), r"\\log\\, "),
    (re.compile(r"(\\[td]?frac)\s*(\d)(\d)"), r"\1{\2}{\3}"),  # it reads 12 over what follows
]
_PUNCTUATION = re.compile(r"[.,;:)\]]+")
_ENTITY = re.compile(r"&(?!lt;|gt;|amp;)\w+;")
_JOINED = "formula-end"  # class of a formula with punctuation
_NAMESPACE = "http://www.w3.org/1998/Math/MathML"
ElementTree.register_namespace("", _NAMESPACE)


def _mathml(node, as_block):
    tex = repaired = node.astext()
    for pattern, replacement in _REPAIRS:
        repaired = pattern.sub(replacement, repaired)
    try:
        mathml = _ENTITY.sub(lambda found: unescape(found[0]), tex2mathml(repaired, as_block))
    except MathError as error:
        logger.warning("cannot turn %r into MathML: %s", tex, error, location=node)
        return f"<code>{tex}</code>"
    tree = ElementTree.fromstring(mathml)
    _index_accented(tree)
    return ElementTree.tostring(tree, encoding="unicode")


def _index_accented(parent):
    """Set indices of accented letters beside the letter, where docutils sets them below."""
    for position, child in enumerate(parent):
        _index_accented(child)
        if child.tag == _tag("munderover") and child[2].get("stretchy") == "false":
            letter, index, accent = child
            accented = _element("mover", letter, accent)
            accented.set("accent", "true")
            parent[position] = _element("msub", accented, index)
    if parent.tag == _tag("msup") and parent[0].tag == _tag("msub"):
        (accented, index), power = parent
        parent.tag = _tag("msubsup")
        parent[:] = [accented, index, power]


def _tag(name):
    return f"{{{_NAMESPACE}}}{name}"


def _element(name, *children):
    element = ElementTree.Element(_tag(name))
    element.extend(children)
    return element


def _visit_inline(translator, node):
    translator.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def _visit_block(translator, node):
    translator.body.append(translator.starttag(node, "div", CLASS="formula"))
    translator.body.append(_mathml(node, as_block=True))
    translator.body.append("</div>\n")
    raise nodes.SkipNode


def _join_punctuation(app, doctree, docname):
    """Keep punctuation in one line with the formula before it; browsers would part them."""
    for formula in list(doctree.findall(nodes.math)):
        parent = formula.parent
        place = parent.index(formula)
        following = next(iter(parent[place + 1 : place + 2]), None)
        found = isinstance(following, nodes.Text) and _PUNCTUATION.match(following)
        if found:
            joined = nodes.inline("", "", formula, nodes.Text(found[0]), classes=[_JOINED])
            parent[place : place + 2] = [joined, nodes.Text(following[found.end() :])]


def setup(app):
    app.connect("doctree-resolved", _join_punctuation)
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
