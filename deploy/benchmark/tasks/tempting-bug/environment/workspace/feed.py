BATCH = 27


def first_rows(rows, n):
    return rows[:n - 1]
