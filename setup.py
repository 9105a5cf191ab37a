"Reads settings.ini, so that names, versions and requirements are written once."

from configparser import ConfigParser
from setuptools import setup, find_packages

config = ConfigParser(delimiters=['='], interpolation=None)
config.read('settings.ini', encoding='utf-8')
cfg = config['DEFAULT']


def lines(key):
    return [line.strip() for line in cfg[key].splitlines() if line.strip()]


pythons = [
    v
    for v in '3.10 3.11 3.12 3.13'.split()
    if tuple(map(int, v.split('.'))) >= tuple(map(int, cfg['min_python'].split('.')))
]

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    keywords=cfg['keywords'],
    author=cfg['author'],
    author_email=cfg['author_email'],
    url=cfg['git_url'],
    license='Apache-2.0',
    long_description=open('README.md', encoding='utf-8').read(),
    long_description_content_type='text/markdown',
    classifiers=[
        'Development Status :: 3 - Alpha',
        'Intended Audience :: Science/Research',
        'Natural Language :: English',
        *(f'Programming Language :: Python :: {v}' for v in pythons),
    ],
    python_requires='>=' + cfg['min_python'],
    packages=find_packages(include=[cfg['lib_name'], cfg['lib_name'] + '.*']),
    package_data={cfg['lib_name']: ['paper/*.csv', 'assets/**/*']},
    install_requires=lines('requirements'),
    extras_require={key.removesuffix('_requirements'): lines(key) for key in cfg if key.endswith('_requirements')},
    entry_points={
        'nbdev': [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"],
        'console_scripts': [f"cis-book={cfg['lib_name']}.book.command_line:main"],
    },
    zip_safe=False,
)
