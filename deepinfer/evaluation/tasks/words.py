"""Word lists that the task generators draw from: common words, so that a small tokenizer spells them in one or two."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    """Entries separated by white space; an underscore stands for a space inside an entry."""
    return tuple(word.replace("_", " ") for word in text.split())


ADJECTIVES = _words(
    """
    silver golden quiet broken wooden frozen little hidden bright dusty gentle hollow iron jolly lonely misty narrow
    old pale quick rusty secret tall velvet warm yellow ancient bitter clever dark early fancy green happy inner
    kind large modern new open plain royal sharp strange tiny useful white young blue black red cold deep empty fair
    grand heavy lost mild noble proud rich soft steep sweet thin wild wise round smooth rough loud calm dry fresh
    """
)
NOUNS = _words(
    """
    lantern river garden castle bridge window mirror letter basket hammer anchor button candle dragon feather forest
    kettle ladder market meadow needle orchard pencil pillow pocket ribbon saddle shadow spoon stable table temple
    tower tunnel valley violin wagon whistle winter wizard apple barrel blanket bottle camera carpet circle clock
    cloud coin cottage crown curtain desk doctor door dress drum engine farmer field finger fire flag flower fox
    glass glove guitar hat hill horse house island jacket kitchen knife lake lamp lemon lion map mill moon mountain
    mouse nest ocean oven paper path piano pilot plate pond queen rabbit rain ring road rock roof room rope rose
    sail salt school sea seed ship shoe shop sky snow song star station stone storm story street sword teacher
    ticket train tree village wall watch water wheel wind wing wolf wood
    """
)
VERBS = _words(
    """
    opened closed painted found carried sold bought cleaned moved watched followed crossed visited repaired measured
    counted described forgot remembered praised built burned lifted hid washed
    """
)
FIRST_NAMES = _words(
    """
    Ada Alan Anna Ben Carl Clara Dan Dora Eli Emma Erik Eva Felix Flora Frank Grace Hans Helen Hugo Ida Ivan Jack
    Jane John Julia Karl Kate Lars Laura Leo Lily Lucy Maria Mark Martha Max Mary Nina Noah Nora Olga Oscar Otto
    Paul Peter Rita Robert Rosa Ruth Sam Sara Simon Sofia Thomas Tom Vera Victor Walter
    """
)
LAST_NAMES = _words(
    """
    Adams Baker Becker Brown Carter Clark Cole Cooper Dale Dean Evans Fisher Ford Foster Fox Gray Green Hall Hart
    Hill Hunt Jones Keller King Lane Lee Long Marsh Mason Miller Moore Nash North Page Park Perry Pope Reed Ross
    Shaw Smith Stone Ward Webb West White Wood Young
    """
)
CITIES = _words(
    """
    Athens Berlin Boston Cairo Dublin Geneva Helsinki Lima Lisbon London Madrid Milan Moscow Naples Oslo Oxford
    Paris Porto Prague Riga Rome Seoul Sydney Tokyo Turin Vienna Warsaw York Zurich Delhi
    """
)
JOBS = _words(
    """
    baker doctor farmer teacher painter pilot lawyer nurse singer driver gardener tailor writer sailor judge cook
    carpenter butcher miner barber librarian engineer
    """
)
COLOURS = _words(
    """
    red blue green yellow white black brown purple orange grey pink gold
    """
)
ANIMALS = _words(
    """
    cat dog horse cow goat sheep rabbit parrot turtle goose pony hamster
    """
)
FOODS = _words(
    """
    bread cheese soup rice honey apples plums fish cake pasta butter beans nuts grapes salad eggs
    """
)
PLACES = _words(
    """
    the_harbour the_market the_old_mill the_station the_library the_park the_church the_school
    """
)
TIMES = _words(
    """
    In_the_morning At_noon In_the_evening At_night Last_week On_Monday In_spring Every_day
    """
)
