"""Docstrings that share parameters: each text is written once and filled in.

A line of a docstring that is only ``%(name)s`` is replaced by the text of that name, with the
line's indentation. The result is an ordinary docstring, for ``help()`` as for the documentation.
"""

import re
import textwrap


def fill_doc(texts):
    """Decorator that fills the texts of a dict into the docstring of a class or function.

    Raises
    ------
    KeyError
        If the docstring asks for a text that `texts` lacks.
    """

    def fill(owner):
        if owner.__doc__:  # None under python -OO
            owner.__doc__ = filled(owner.__doc__, texts)
        return owner

    return fill


def filled(docstring, texts):
    """A docstring in which each line that is only ``%(name)s`` is the text of that name, indented.

    Raises
    ------
    KeyError
        If the docstring asks for a text that `texts` lacks.
    """

    def replacement(match):
        text = textwrap.dedent(texts[match[2]]).strip("\n")
        return textwrap.indent(text.rstrip(), match[1])

    return re.sub(r"^( *)%\((\w+)\)s$", replacement, docstring, flags=re.M)
