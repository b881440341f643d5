"""What built-in training prompts are made of: kinds of requests by task, and the things that they are about. Data only.

The last two kinds of each task are never trained on (edgebuild.train.prompts).
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


FILLINGS: dict[str, tuple[str, ...]] = {
    "topic": _words(
        "photosynthesis, gravity, volcanoes, the water cycle, inflation, black holes, vaccines, solar panels, "
        "democracy, the Roman Empire, electric cars, machine learning, the immune system, earthquakes, DNA, "
        "the stock market, coral reefs, the Renaissance, plate tectonics, recycling, nuclear energy, sleep, "
        "the Silk Road, antibiotics, tides, glaciers, the printing press, bees, evolution, batteries, rainbows, "
        "wind turbines, the moon landing, compound interest, the human heart, deserts, satellites, fermentation, "
        "the French Revolution, ocean currents, magnets, supply and demand, the Great Wall of China, lightning, "
        "the internet, meditation, climate change, the solar system, steam engines, penicillin, migration of birds, "
        "the ozone layer, public transport, encryption, fossils, jazz music, the Cold War, tsunamis, microchips, "
        "the Amazon rainforest, nutrition, volunteering, the digestive system, hurricanes, the Olympic Games, "
        "robotics, soil erosion, friction, the Industrial Revolution, whales, Impressionism, 3D printing, stars, "
        "caffeine, mindfulness, lasers, the Nile, chess, the circulatory system, mushrooms, semiconductors"
    ),
    "place": _words(
        "Paris, Tokyo, Cairo, Rome, Berlin, Madrid, Kyoto, Lisbon, Vienna, Prague, Istanbul, Athens, Dublin, Oslo, "
        "Amsterdam, Barcelona, Seoul, Bangkok, Sydney, Toronto, New York, Chicago, San Francisco, Mexico City, Lima, "
        "Buenos Aires, Cape Town, Nairobi, Marrakesh, Mumbai, Delhi, Singapore, Hanoi, Edinburgh, Florence, Venice, "
        "Munich, Zurich, Copenhagen, Stockholm, Helsinki, Warsaw, Budapest, Reykjavik, Havana, Rio de Janeiro"
    ),
    "country": _words(
        "France, Japan, Egypt, Italy, Germany, Spain, Portugal, Austria, Turkey, Greece, Ireland, Norway, Brazil, "
        "Canada, Mexico, Peru, Argentina, Kenya, Morocco, India, Vietnam, Thailand, Australia, Sweden, Finland, "
        "Poland, Hungary, Iceland, Cuba, South Korea, Indonesia, Switzerland, Chile, Nigeria, New Zealand"
    ),
    "skill": _words(
        "cook rice, learn the guitar, write a cover letter, train for a marathon, save money, grow tomatoes, "
        "give a presentation, bake bread, paint a room, learn Spanish, fix a flat tire, start a blog, meditate, "
        "plan a budget, study for an exam, clean a keyboard, make friends in a new city, sleep better, "
        "write a short story, take better photos, prepare for a job interview, organize a closet, read more books, "
        "set up a home office, brew coffee, knit a scarf, build a birdhouse, swim faster, remember names, "
        "reduce stress, wake up earlier, plan a wedding, care for a puppy, change a light bulb, fold a shirt"
    ),
    "food": _words(
        "pancakes, lentil soup, pizza, fried rice, apple pie, vegetable curry, tomato pasta, chocolate cake, tacos, "
        "omelette, pumpkin soup, banana bread, potato salad, stir-fried noodles, mushroom risotto, chicken stew, "
        "oatmeal cookies, guacamole, lasagna, hummus, sushi rolls, bean chili, fruit salad, garlic bread, waffles"
    ),
    "person": _words(
        "a teacher, a nurse, a farmer, a pilot, a baker, a detective, a sailor, a librarian, a carpenter, a chef, "
        "a gardener, a musician, a firefighter, a clockmaker, an astronaut, a fisherman, a painter, a mail carrier, "
        "a shepherd, a scientist, a blacksmith, a lighthouse keeper, a taxi driver, a photographer, a tailor, "
        "a young inventor, an old magician, a retired engineer, a traveling merchant, a shy student"
    ),
    "creature": _words(
        "fox, dragon, owl, rabbit, wolf, cat, dog, turtle, bear, mouse, elephant, whale, robot, crow, horse, squirrel, "
        "lion, frog, penguin, spider, deer, hedgehog, parrot, dolphin, goat, tiger, butterfly, octopus, donkey"
    ),
    "setting": _words(
        "a quiet village, a deep forest, an abandoned castle, a space station, a small island, a snowy mountain, "
        "a busy market, an old library, a desert town, a hidden cave, a floating city, a rainy harbor, "
        "a magic school, a train at night, a sunken ship, a farm in autumn, a clock tower, a frozen lake, "
        "a lost temple, a city of glass, a garden behind a wall, a lighthouse, a jungle, "
        "a museum after dark, a small bakery"
    ),
    "theme": _words(
        "friendship, courage, kindness, loss, hope, honesty, curiosity, forgiveness, patience, freedom, family, "
        "a broken promise, a secret map, a lost key, a second chance, a strange letter, a storm, a stolen treasure, "
        "a forgotten song, a race against time, an unexpected gift, a mistake, a dream, growing up, first day at work"
    ),
    "function": _words(
        "reverses a string, computes the factorial of a number, checks whether a number is prime, "
        "finds the largest number in a list, counts the vowels in a string, returns the nth Fibonacci number, "
        "sorts a list of numbers, removes duplicates from a list, checks whether a string is a palindrome, "
        "computes the average of a list, merges two sorted lists, counts the words in a text, "
        "finds the second largest number in a list, converts Celsius to Fahrenheit, computes the sum of digits, "
        "flattens a nested list, checks whether two strings are anagrams, finds the common elements of two lists, "
        "rotates a list by k places, computes the greatest common divisor, converts a number to binary, "
        "filters the even numbers of a list, capitalizes each word, computes the area of a circle, "
        "reads a text file and counts its lines, multiplies two matrices, finds the longest word in a sentence, "
        "groups words by their first letter, validates an email address, computes compound interest, "
        "generates a random password, transposes a matrix, finds the index of an element, computes the median, "
        "checks for balanced parentheses, squares every number in a list, computes the power of a number, "
        "counts how often each character occurs, splits a list into chunks, finds all divisors of a number, "
        "swaps two variables, computes the distance between two points, removes punctuation from a text, "
        "converts a list to a dictionary, finds the minimum of a list, prints a multiplication table"
    ),
    "class": _words(
        "a bank account, a stack, a queue, a linked list, a rectangle, a student, a library, a shopping cart, a car, "
        "a binary search tree, a deck of cards, a timer, a playlist, a matrix, an employee, a bookstore, a counter, "
        "a temperature sensor, a parking lot, a graph, a calculator, a chat room, a vending machine, a to-do list"
    ),
    "language": _words("Python, JavaScript, Java, C++, Go, Rust"),
    "record": _words(
        "a book, a car, a customer, a movie, a recipe, a song, a city, a laptop, a hotel, a flight, an employee, "
        "a student, a product, a restaurant, a phone, a course, a company, a country, a football team, a bicycle, "
        "an invoice, a pet, a museum, a game, a house, a printer, a camera, an event, a painting, a bank account, "
        "a weather report, a delivery, a train ticket, a doctor, a garden plant, a fictional hero, a planet"
    ),
    "fields": _words(
        "name and price, title and year, id and status, name and age, city and country, name and email, "
        "model and color, type and size, date and amount, name and description, id and owner, brand and weight, "
        "title and rating, name and location, code and quantity, name and category, start and end, id and tags, "
        "first and last, name and phone, title and author, height and width"
    ),
    "count": _words("two, three, four, five"),
    "name": _words(
        "Anna Schmidt, John Miller, Maria Garcia, Wei Chen, Priya Patel, Tom Baker, Fatima Hassan, Lucas Silva, "
        "Emma Johansson, David Kim, Olga Ivanova, James Wright, Sofia Rossi, Ahmed Ali, Laura Novak, Peter Jansen, "
        "Grace Okafor, Daniel Cohen, Yuki Tanaka, Chloe Martin, Ivan Petrov, Sara Lopez, Mark Hughes, Nina Berg"
    ),
    "company": _words(
        "Northwind Traders, Acme Tools, Blue Harbor Foods, Sunrise Energy, Maple Books, Iron Peak Mining, "
        "Clearwater Labs, Silver Line Airlines, Green Valley Farms, Orbit Telecom, Stonebridge Bank, Red Fox Games, "
        "Lakeside Hotels, Brightway Schools, Cedar Furniture, Nova Robotics, Pine Street Bakery, Atlas Shipping, "
        "Riverside Clinic, Summit Sports, Golden Gate Media, Polar Ice Cream"
    ),
    "product": _words(
        "laptops, office chairs, bicycles, coffee machines, headphones, printers, water filters, solar lamps, tents, "
        "running shoes, cameras, desks, blankets, notebooks, drills, monitors, backpacks, toasters, watches, pillows, "
        "tablets, microphones, kettles"
    ),
    "date": _words(
        "March 3, May 17, June 21, July 9, August 30, September 12, October 5, November 24, December 1, January 15, "
        "February 8, April 27"
    ),
    "amount": _words("12, 25, 40, 75, 120, 200, 350, 500, 640, 900"),
    "tone": _words("short, funny, simple, detailed, friendly"),
}

TEMPLATES: dict[str, tuple[str, ...]] = {
    "chat": (
        "What is {topic}?",
        "Explain {topic} in simple terms.",
        "Why is {topic} important?",
        "Give me {count} interesting facts about {topic}.",
        "How do I {skill}?",
        "What are the best tips to {skill}?",
        "I want to {skill}. Where should I start?",
        "What should I see in {place} in one day?",
        "What is the capital of {country} and what is it known for?",
        "Tell me about the culture of {country}.",
        "How do I make {food}?",
        "What is the difference between {topic} and {topic}?",
        "Can you summarize {topic} for a ten-year-old?",
        "What are the advantages and disadvantages of {topic}?",
        "What does {person} do all day?",
        "I am going to {place} next week. What should I pack?",
        "Write a {tone} paragraph about {topic}.",
        "List {count} ways to {skill}.",
        "Is it hard to {skill}? Be honest.",
        "What food is {country} famous for?",
        "How does {topic} affect our daily life?",
        "Write a {tone} email to a friend about a trip to {place}.",
        "Who would enjoy learning about {topic}, and why?",
        "My friend wants to {skill} but has little time. What would you recommend?",
    ),
    "code": (
        "Write a {language} function that {function}.",
        "Write a Python function that {function}.",
        "Write a Python function that {function}. Add a docstring.",
        "Write a {language} class for {class}.",
        "Write a Python class for {class} with {count} methods.",
        "Show me {language} code that {function}, with an example.",
        "Implement a {language} program that {function}.",
        "How do I write a function in {language} that {function}?",
        "Write Python code that {function} without using built-in functions.",
        "Write a Python function that {function} and another that {function}.",
        "Write a unit test in Python for a function that {function}.",
        "Complete this Python function:\n\ndef solve(data):\n    # {function}",
        "Write a {tone} {language} script that {function}.",
    ),
    "json": (
        "Give me a JSON object that describes {record}.",
        "Write a JSON object for {record} with the fields {fields}.",
        "Create a JSON array with {count} entries; each is {record}.",
        "Return {record} as JSON with {count} fields. Output only JSON.",
        "Make a JSON list of {count} objects with the fields {fields}.",
        "Write JSON for {record} that belongs to {name}.",
        "Produce a JSON configuration for {record} with nested objects.",
        "Output a JSON document about {country} with the capital, the population and the currency.",
        "Write a JSON object with {count} keys about {topic}.",
        "Give an example of a JSON response of an API that returns {record}.",
        "Write a JSON array of {count} cities in {country}.",
        "Turn this into JSON: {name} works at {company} and sells {product}.",
        "Describe {company} as a JSON object with its products and employees.",
    ),
    "story": (
        "Write a short story about a {creature} who lives in {setting}.",
        "Tell me a story about {person} and a {creature}.",
        "Write a story about {theme} set in {setting}.",
        "Once upon a time there was a {creature} in {setting}. Continue the story.",
        "Write a bedtime story about a {creature} and {theme}.",
        "Tell a {tone} story about {person} in {setting}.",
        "Write a short adventure in {setting} with a {creature} and a {creature}.",
        "Write a story in which {person} learns about {theme}.",
        "Begin a story with {person} arriving at {setting}.",
        "Write a fairy tale about {theme} and a {creature}.",
        "Write a mystery story: something disappears in {setting}.",
        "Write a dialogue between {person} and a {creature} about {theme}.",
        "Describe a dream that {person} had about {setting}.",
    ),
    "extraction": (
        "Extract the name, the company and the product from this text: "
        '"{name} of {company} ordered {amount} {product} on {date}."',
        'List all names in this text: "{name} met {name} in {place} on {date} to talk about {topic}."',
        'What is the date in this message? "Hi, this is {name}. The meeting with {company} is on {date} in {place}."',
        'Extract all numbers from this text: "{company} sold {amount} {product} in {place} and {amount} in {place}."',
        'Summarize in one sentence: "{company} announced on {date} that {name} will lead its office in {place}. '
        'The company makes {product} and employs {amount} people."',
        'Which company is mentioned here? "On {date}, {name} bought {amount} {product} from {company}."',
        'Extract the places from this text: "{name} travelled from {place} to {place} and stayed until {date}."',
        'Answer from the text: who sells {product}? "{company} sells {product} in {country}. {name} is the manager."',
        'Copy the sentence that mentions {place}: "{name} lives in {place}. {company} makes {product}. It is {date}."',
        'Give the order as lines of key: value. "{name}, {place}, ordered {amount} {product} from {company}."',
        'Extract the person and the city: "{name}, who works for {company}, moved to {place} on {date}."',
        'How many {product} were sold? "On {date} {company} sold {amount} {product} to {name}."',
    ),
}
