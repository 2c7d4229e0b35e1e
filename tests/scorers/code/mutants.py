"""Wrong versions of right functions: one change of the syntax tree each."""

import ast
import copy

FLIPPED = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


def mutants(source):
    """Return (name, source) of every mutant of one function: flipped comparisons, other constants, other returns."""
    tree = ast.parse(source)
    function = tree.body[-1]
    found = []
    for k, node in enumerate(ast.walk(function)):
        for name, change in CHANGES.items():
            if change(copy.deepcopy(node)) is None:
                continue
            changed = copy.deepcopy(tree)
            target = list(ast.walk(changed.body[-1]))[k]
            change(target)
            found.append((f"{name} {ast.unparse(node)!r:.60}", ast.unparse(ast.fix_missing_locations(changed))))
    return found


def flip(node):
    if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPPED:
        node.ops[0] = FLIPPED[type(node.ops[0])]()
        return node
    return None


def off_by_one(node):
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
        return node
    return None


def other_return(node):
    if not isinstance(node, ast.Return) or node.value is None:
        return None
    if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
        node.value = ast.Constant(not node.value.value)
    elif isinstance(node.value, ast.Tuple):
        node.value.elts.reverse()
    else:
        node.value = ast.List([node.value], ast.Load())
    return node


CHANGES = {"flipped": flip, "off by one": off_by_one, "other return": other_return}
