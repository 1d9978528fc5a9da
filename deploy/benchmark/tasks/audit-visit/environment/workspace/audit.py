LOG = []


def visit(count):
    return count * 3
