RETRIES = 3
TIMEOUT = 30
WORKERS = 4


def budget(n):
    return n * RETRIES
