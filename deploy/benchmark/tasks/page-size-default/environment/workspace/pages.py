def fetch(x, size=20):
    return x + size


def scan(x):
    return fetch(x) * 2
