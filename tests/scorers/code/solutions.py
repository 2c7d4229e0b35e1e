# ruff: noqa: E501
"""A right solution of every embedded task of `Code-v0`: the body of a function, or a whole program."""

SOLUTIONS = {
    "function-add-vat": "    return round(price * (1 + rate / 100), 2)\n",
    "function-count-weekdays": "    return sum(day.lower() in ('mon', 'tue', 'wed', 'thu', 'fri') for day in days)\n",
    "function-longest-word": (
        "    best = ''\n"
        "    for word in text.split():\n"
        "        if len(word) > len(best):\n"
        "            best = word\n"
        "    return best\n"
    ),
    "function-running-balance": (
        "    balance, result = 0, []\n"
        "    for amount in amounts:\n"
        "        balance += amount\n"
        "        result.append(balance)\n"
        "    return result\n"
    ),
    "function-swap-halves": (
        "    half = len(items) // 2\n"
        "    if len(items) % 2:\n"
        "        return items[half + 1:] + [items[half]] + items[:half]\n"
        "    return items[half:] + items[:half]\n"
    ),
    "function-is-leap": "    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n",
    "function-seat-name": ("    row, seat = divmod(number - 1, 6)\n    return str(row + 1) + 'ABCDEF'[seat]\n"),
    "function-compress-runs": (
        "    result, k = '', 0\n"
        "    while k < len(text):\n"
        "        end = k\n"
        "        while end < len(text) and text[end] == text[k]:\n"
        "            end += 1\n"
        "        result += text[k] + str(end - k)\n"
        "        k = end\n"
        "    return result\n"
    ),
    "function-merge-counts": (
        "    names = list(first) + [name for name in second if name not in first]\n"
        "    sums = {name: first.get(name, 0) + second.get(name, 0) for name in names}\n"
        "    return {name: count for name, count in sums.items() if count != 0}\n"
    ),
    "function-clock-angle": (
        "    angle = abs((hour % 12) * 30 + minute * 0.5 - minute * 6)\n    return min(angle, 360 - angle)\n"
    ),
    "function-digits-sum-until-one": (
        "    while number > 9:\n        number = sum(int(digit) for digit in str(number))\n    return number\n"
    ),
    "function-find-gap": "    return len(numbers) * (len(numbers) + 1) // 2 - sum(numbers)\n",
    "function-split-bill": (
        "    share, rest = divmod(total, people)\n    return [share + 1] * rest + [share] * (people - rest)\n"
    ),
    "function-title-case": (
        "    words = text.lower().split(' ')\n"
        "    small = ('of', 'and', 'the')\n"
        "    return ' '.join(word if k and word in small else word[:1].upper() + word[1:] for k, word in enumerate(words))\n"
    ),
    "function-stairs": (
        "    a, b, c = 1, 0, 0\n    for _ in range(steps):\n        a, b, c = a + b + c, a, b\n    return a\n"
    ),
    "function-rotate-clockwise": "    return [[row[column] for row in reversed(grid)] for column in range(len(grid[0]))]\n",
    "function-longest-streak": "    return max(len(part) for part in results.split('l'))\n",
    "function-common-prefix": (
        "    prefix = words[0]\n"
        "    for word in words:\n"
        "        while not word.startswith(prefix):\n"
        "            prefix = prefix[:-1]\n"
        "    return prefix\n"
    ),
    "function-median-of": (
        "    ordered = sorted(numbers)\n"
        "    half = len(ordered) // 2\n"
        "    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2\n"
    ),
    "function-caesar": "    return ''.join(chr((ord(c) - 97 + shift) % 26 + 97) if 'a' <= c <= 'z' else c for c in text)\n",
    "function-prime-factors": (
        "    factors, divisor = [], 2\n"
        "    while number > 1:\n"
        "        if number % divisor:\n"
        "            divisor += 1\n"
        "        else:\n"
        "            factors.append(divisor)\n"
        "            number //= divisor\n"
        "    return factors\n"
    ),
    "function-overlap": "    return max(0, min(first[1], second[1]) - max(first[0], second[0]))\n",
    "function-to-roman": (
        "    values = [(1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC'), (50, 'L'), (40, 'XL'), (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')]\n"
        "    text = ''\n"
        "    for value, numeral in values:\n"
        "        while number >= value:\n"
        "            text += numeral\n"
        "            number -= value\n"
        "    return text\n"
    ),
    "function-group-by-length": (
        "    groups = {}\n"
        "    for word in words:\n"
        "        groups.setdefault(len(word), []).append(word)\n"
        "    return groups\n"
    ),
    "function-balanced": (
        "    pairs, waiting = {')': '(', ']': '[', '}': '{'}, []\n"
        "    for c in text:\n"
        "        if c in '([{':\n"
        "            waiting.append(c)\n"
        "        elif c in pairs and (not waiting or waiting.pop() != pairs[c]):\n"
        "            return False\n"
        "    return not waiting\n"
    ),
    "function-second-largest": (
        "    different = sorted(set(numbers))\n    return different[-2] if len(different) > 1 else None\n"
    ),
    "program-sum-of-lines": ("import sys\nprint(sum(int(line) for line in sys.stdin if line.strip()))\n"),
    "program-echo-upper": "print(input().upper())\n",
    "program-rectangle": ("w, h = map(int, input().split())\nfor _ in range(h):\n    print('#' * w)\n"),
    "program-even-or-odd": ("for _ in range(int(input())):\n    print('odd' if int(input()) % 2 else 'even')\n"),
    "program-word-counts": (
        "words = input().split()\nfor word in sorted(set(words)):\n    print(word, words.count(word))\n"
    ),
    "program-largest-rise": (
        "best, low = 0, None\n"
        "for price in map(int, input().split()):\n"
        "    low = price if low is None else min(low, price)\n"
        "    best = max(best, price - low)\n"
        "print(best)\n"
    ),
    "program-reverse-lines": ("lines = [input() for _ in range(int(input()))]\nprint('\\n'.join(reversed(lines)))\n"),
    "program-multiples": ("a, b, k = map(int, input().split())\nprint(b // k - (a - 1) // k)\n"),
    "program-binary": "print(bin(int(input()))[2:])\n",
    "program-grades": (
        "import sys\n"
        "best = None\n"
        "for line in sys.stdin:\n"
        "    if line.strip():\n"
        "        name, points = line.split()\n"
        "        if best is None or int(points) > best[1]:\n"
        "            best = name, int(points)\n"
        "print(best[0])\n"
    ),
    "program-collatz": (
        "n, steps = int(input()), 0\n"
        "while n != 1:\n"
        "    n = n // 2 if n % 2 == 0 else 3 * n + 1\n"
        "    steps += 1\n"
        "print(steps)\n"
    ),
    "program-seconds": ("s = int(input())\nprint(f'{s // 3600:02d}:{s // 60 % 60:02d}:{s % 60:02d}')\n"),
    "program-transpose": (
        "rows, columns = map(int, input().split())\n"
        "table = [input().split() for _ in range(rows)]\n"
        "for c in range(columns):\n"
        "    print(' '.join(row[c] for row in table))\n"
    ),
    "program-coins": (
        "cents, coins = int(input()), 0\n"
        "for coin in (50, 20, 10, 5, 2, 1):\n"
        "    coins += cents // coin\n"
        "    cents %= coin\n"
        "print(coins)\n"
    ),
}
