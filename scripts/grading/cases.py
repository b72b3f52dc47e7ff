"""Turn a checker's assertions into cases: all are tried, and each counts.

    assert test, message              if test: _passed()
                                      else: _failed(message)

    if test:                          if test:
        words = ...                       try: ... the same body
        raise AssertionError(words)       except AssertionError as error: _failed(error)
                                      else: _passed()

A test of a type or of None is a case only where it fails: otherwise `return 0` would have points for being a number.

The statements stay where they are, so a message is computed only for a failed case. Each rank records its cases as they
come: an exception after a failed case loses only the later ones.
"""

import ast

SLOW = "does a loop not end?"
PRELUDE = """
def _passed(record=record):
    record(case=True)
def _failed(why, record=record):
    record(case=False, why=str(why))
"""
LIMIT = """
def _stop(*_):
    raise RuntimeError("it computes for more than {seconds} s: {question}")
def _limit():
    import resource, signal
    signal.signal(signal.SIGXCPU, _stop)
    resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, resource.getrlimit(resource.RLIMIT_CPU)[1]))
_limit()
"""
END = "record(end=True)"


class Cases(ast.NodeTransformer):
    """Replace assertions by cases."""

    def visit_Assert(self, node):
        why = node.msg or ast.Constant(ast.unparse(node.test))
        return ast.If(node.test, [passed(node.test)], [call("_failed", why)])

    def visit_If(self, node):
        if node.orelse or not raises_assertion(node.body[-1]):
            return self.generic_visit(node)
        failed = ast.ExceptHandler(name("AssertionError"), "_error", [call("_failed", name("_error"))])
        return ast.If(node.test, [ast.Try(node.body, [failed], [], [])], [passed(node.test)])


def passed(test):
    """Return the statement for a test that passed: nothing, if it is of a type only."""
    return ast.Pass() if is_of_type(test) else call("_passed")


def is_of_type(test):
    """Return whether a test asks only for types or None: what passes it may be any value."""
    if isinstance(test, ast.BoolOp):
        return all(map(is_of_type, test.values))
    if isinstance(test, ast.UnaryOp):
        return is_of_type(test.operand)
    if isinstance(test, ast.Compare):
        return all(isinstance(one, (ast.Is, ast.IsNot)) for one in test.ops)
    return isinstance(test, ast.Call) and ast.unparse(test.func) in ("isinstance", "callable", "hasattr")


def raises_assertion(node):
    """Return whether a statement is `raise AssertionError(...)`."""
    error = node.exc if isinstance(node, ast.Raise) else None
    return isinstance(error, ast.Call) and ast.unparse(error.func) == "AssertionError"


def name(text):
    return ast.Name(text, ast.Load())


def call(function, *arguments):
    return ast.Expr(ast.Call(name(function), [*arguments], []))


def as_cases(checker):
    """Return the source of a checker whose assertions are cases. checker: source of a function."""
    tree = Cases().visit(ast.parse(checker))
    return ast.unparse(ast.fix_missing_locations(tree))


def program(pieces, answer, checker, source, seconds):
    """Return (source for the ranks, [(first line, number of lines, Piece)]).

    answer, checker: names of the functions. source: of the checker, from as_cases(). seconds: of CPU time that a rank
    may use; then the line that it runs raises an error. The checker comes after the answer, so a function of the same
    name in the submission does not replace it.
    """
    lines, places = f"{PRELUDE}{LIMIT.format(seconds=seconds, question=SLOW)}".split("\n"), []
    for piece in pieces:
        text = piece.text.split("\n")
        places.append((len(lines) + 1, len(text), piece))
        lines += text
    return "\n".join([*lines, source, f"{checker}({answer})", END, ""]), places
