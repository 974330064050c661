from slugs import SlugStore, slugify


def test_plain():
    assert [slugify(title) for title in ("A B  c", "Top-10!", "??", "x_y")] == ["a-b-c", "top-10", "untitled", "x-y"]


def test_one_accent():
    assert slugify("Ma\u00f1ana") == "manana" and slugify("na\u00efve") == "naive"


def test_capitals_with_accents():
    assert slugify("\u00c9T\u00c9 \u00c0 \u00d6rebro") == "ete-a-orebro"


def test_accents_apart():
    assert slugify("Man\u0303ana u\u0308ber") == "manana-uber"


def test_several_accents():
    assert slugify("Vi\u1ec7t Nam") == "viet-nam"


def test_letters_of_their_own():
    assert slugify("\u00c6r\u00f8 \u0142\u00df") == "aero-lss"


def test_joined_letters():
    assert slugify("\ufb02ag e\ufb00ect") == "flag-effect"


def test_wide_letters():
    assert slugify("\uff21\uff22\uff11") == "ab1"


def test_cut():
    assert [slugify("alpha beta gamma", limit) for limit in (12, 10, 9, 3)] == [
        "alpha-beta", "alpha-beta", "alpha", "alp"]


def test_cut_with_accents():
    assert slugify("\u00e9cole \u00e9t\u00e9", limit=6) == "ecole"


def test_store():
    store = SlugStore()
    assert [store.add(title) for title in ("\u00dcber", "uber", "U\u0308ber")] == ["uber", "uber-2", "uber-3"]
    assert store.find("uber-2") == "uber" and store.find("uber-4") is None
