from slugger import UniqueSlugs, slugify


def test_words_are_joined():
    assert slugify("  Hello,   World! ") == "hello-world"


def test_digits_stay():
    assert slugify("Top 10 of 2023") == "top-10-of-2023"


def test_long_titles_lose_whole_words():
    assert slugify("alpha beta gamma", longest=11) == "alpha-beta"


def test_nothing_left():
    assert slugify("!!!") == "untitled"


def test_second_title():
    slugs = UniqueSlugs()
    assert [slugs.take("News"), slugs.take("News")] == ["news", "news-2"]


def test_released():
    slugs = UniqueSlugs()
    slugs.release(slugs.take("News"))
    assert slugs.take("News") == "news"
