def shown(items, n):
    return items[:n - 1]


def page(items):
    return shown(items, 3)
