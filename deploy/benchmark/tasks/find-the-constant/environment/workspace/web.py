PORT = 80


def load(n):
    return n + PORT
