LIMIT = 9


def load(n):
    return n + LIMIT


def send(n):
    return n - LIMIT
